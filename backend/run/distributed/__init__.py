"""A run on several machines: its launcher, how its ranks talk, and what each of them does."""
