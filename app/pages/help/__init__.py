"""The package app.pages.help."""
