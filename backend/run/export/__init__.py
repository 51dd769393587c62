"""Export of a run: which of its weights, on which of its completions they are compared, and what they earn on held-out prompts."""
