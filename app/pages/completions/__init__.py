"""The Completions page."""
