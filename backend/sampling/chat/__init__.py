"""The package backend.sampling.chat."""
