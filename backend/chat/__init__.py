"""Talking to a model: what a run has trained beside the base it came from, answering the same prompt with the same random numbers."""
