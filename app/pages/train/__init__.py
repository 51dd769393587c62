"""The package app.pages.train."""
