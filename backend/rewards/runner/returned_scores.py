"""Convert a reward function's return value to scores: lists, tuples, generators and arrays of any library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

from backend.rewards.runner.error_text import class_name, text_of
from backend.spec.user_input.text import shown

Scores = list[float | None]
LARGEST = 1e30
"""The largest score, either way: advantages are in float32, whose squares and sums of what is larger are infinite."""


class InvalidScores(Exception):
    """The return value cannot be used as scores; `index` is the first completion where this shows."""

    def __init__(self, what: str, index: int = 0) -> None:
        super().__init__(what)
        self.index = index


def read_scores(returned: Any, count: int) -> Scores:
    """`count` finite numbers or None. Raises InvalidScores."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        kind = "None" if returned is None else class_name(returned)
        raise InvalidScores(f"{kind} where a list of {count} scores was expected")
    values = list(values)
    if len(values) != count:
        raise InvalidScores(f"{len(values):,} scores for {count:,} completions")
    return [_score(value, index) for index, value in enumerate(values)]


def _score(value: Any, index: int) -> float | None:
    if value is None:
        return None
    number = _as_float(value)
    if number is None:
        raise InvalidScores(
            f"{shown(text_of(value, repr), 40)} ({class_name(value, 20)}) as a score, which is not a number",
            index,
        )
    if not math.isfinite(number):
        raise InvalidScores(f"{number} as a score, which is not a finite number", index)
    if abs(number) > LARGEST:
        raise InvalidScores(f"{number:g} as a score, which is too large for 32 bits", index)
    return number


def _as_float(value: Any) -> float | None:
    """Bools and any library's scalars have `__float__`. Text has not: `"1"` stays no number."""
    try:
        return float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.inf
