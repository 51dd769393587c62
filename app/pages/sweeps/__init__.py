"""The package app.pages.sweeps."""
