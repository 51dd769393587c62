"""Reward functions as settings name them and as source text describes them. Never runs a user's code."""
