"""The package backend.trainer.memory."""
