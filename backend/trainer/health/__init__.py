"""The package backend.trainer.health."""
