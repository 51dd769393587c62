"""The package app.pages.shared."""
