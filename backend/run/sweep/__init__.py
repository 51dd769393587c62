"""Sweeps: many runs in one process, in turns, on one base model in memory; the weaker ones given up as they go."""
