"""The package backend.config.settings."""
