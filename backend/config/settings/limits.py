"""Upper limits that settings of several subjects share."""

MOST_TOKENS = 10_000_000
"""Tokens of a prompt and its completion: a hundred times what most models read, as many as any does."""
NEVER = 1_000_000_000
"""Upper limit of settings that say how often or how many at most: longer than any run."""
MOST_COMPLETIONS = 1_000_000
"""Completions of one step. More is a slip, and what is computed from it would take hours."""
MOST_STEPS = 100_000_000
"""Steps of one run."""
LARGEST_WEIGHT = 1_000_000
"""Of a reward: products with larger ones leave float32's exact range."""
