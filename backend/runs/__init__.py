"""The package backend.runs."""
