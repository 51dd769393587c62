"""A run over several processes, on one machine or many: its launcher, how its ranks talk, and what each of them does."""
