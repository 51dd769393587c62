"""The package backend.trainer."""
