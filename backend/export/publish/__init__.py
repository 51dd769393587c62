"""The package backend.export.publish."""
