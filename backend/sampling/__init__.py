"""The package backend.sampling."""
