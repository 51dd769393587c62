"""The package app.pages.completions."""
