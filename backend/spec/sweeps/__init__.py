"""Sweeps: their files, the runs that they plan, and their results."""
