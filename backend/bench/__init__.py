"""Measures our own steps: speed and memory, in CPU seconds beside wall seconds."""
