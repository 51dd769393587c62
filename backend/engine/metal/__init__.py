"""Kernels of our own for a decoding step on Metal, each with the same computation in plain mlx."""
