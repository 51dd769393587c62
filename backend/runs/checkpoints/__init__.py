"""The package backend.runs.checkpoints."""
