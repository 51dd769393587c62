"""The package app.pages.rewards."""
