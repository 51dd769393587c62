"""The package backend.distributed."""
