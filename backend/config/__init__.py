"""The package backend.config."""
