"""Checkpoints of a run: written, read, checked, scored, rotated, and gone back to."""
