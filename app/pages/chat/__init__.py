"""The package app.pages.chat."""
