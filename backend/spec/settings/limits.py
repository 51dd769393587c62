"""Upper limits that settings of several subjects share."""

MOST_TOKENS = 10_000_000
"""Tokens of a prompt and its completion: a hundred times what most models read, as many as any does."""
NEVER = 1_000_000_000
"""Upper limit of settings that say how often or how many at most: longer than any run."""
