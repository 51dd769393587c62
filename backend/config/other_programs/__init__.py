"""The package backend.config.other_programs."""
