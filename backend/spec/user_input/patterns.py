"""What a regular expression of somebody else may cost before it has matched anything."""

from __future__ import annotations

import math
import re

MOST_REPEATS = 10_000
"""Product of a pattern's counts, as in {20}: what matches writes each repetition out, and a billion took all memory."""


def repeats_too_often(pattern: str) -> bool:
    """Whether its counted repetitions amount to more than MOST_REPEATS."""
    # A literal brace counts too, which is no loss. Ten digits are more than enough to be too many.
    counts = (int(count[:10]) for count in re.findall(r"\{([0-9]+)", pattern))
    return math.prod(count for count in counts if count) > MOST_REPEATS
