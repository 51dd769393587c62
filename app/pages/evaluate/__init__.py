"""The package app.pages.evaluate."""
