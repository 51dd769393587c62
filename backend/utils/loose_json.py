"""JSON as Python writes it, NaN and Infinity included: rows of datasets and files of models hold such numbers.

Settings and files of ours are read by `backend.utils.documents`, which refuses them.
"""

from __future__ import annotations

import json
from typing import Any

DEPTH = 100
"""Levels of lists and objects. What reads a value later walks it by recursion, two calls a level."""


class BrokenJson(ValueError):
    """The text is no JSON that can be used: why, as part of a sentence, and the line where that shows (0 where none does)."""

    def __init__(self, why: str, line: int = 0) -> None:
        super().__init__(why)
        self.why, self.line = why, line


def parse(text: str) -> Any:
    """The value of a JSON text. Raises BrokenJson."""
    try:
        value = json.loads(text)
        if text.count("[") + text.count("{") > DEPTH and _depth(value) > DEPTH:
            raise RecursionError
    except json.JSONDecodeError as error:
        raise BrokenJson(error.msg, error.lineno) from None
    except RecursionError:
        raise BrokenJson(f"it is nested more than {DEPTH} levels deep") from None
    except (
        ValueError
    ):  # the one error of `int` here: Python's limit on digits, against numbers that take minutes to convert
        raise BrokenJson("a whole number has more than 4,300 digits") from None
    return value


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted without recursion, up to DEPTH + 1."""
    level: list[Any] = [value]
    depth = -1
    while level and depth <= DEPTH:
        depth += 1
        inner: list[Any] = []
        for part in level:
            if isinstance(part, (list, dict)):
                inner.extend(part.values() if isinstance(part, dict) else part)  # pyright: ignore
        level = inner
    return depth
