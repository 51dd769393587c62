"""The package app.pages.dataset."""
