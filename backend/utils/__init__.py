"""The package backend.utils."""
