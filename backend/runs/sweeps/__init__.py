"""The package backend.runs.sweeps."""
