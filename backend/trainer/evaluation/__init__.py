"""A run evaluated: while it trains, and before against after, with intervals."""
