"""The package app.pages.monitor."""
