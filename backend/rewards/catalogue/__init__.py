"""The package backend.rewards.catalogue."""
