"""The package app.pages.runs."""
