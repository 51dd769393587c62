"""The table of completions, and one completion in full."""
