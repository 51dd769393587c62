"""Call reward functions on the completions of a step: inputs, time limits, returned scores, errors, extra logs."""
