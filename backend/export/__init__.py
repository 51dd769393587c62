"""The package backend.export."""
