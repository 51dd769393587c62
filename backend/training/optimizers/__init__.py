"""Optimizers by name, their state in 32 or 8 bits, the learning rate of every update, and gradient clipping. No model, no files."""
