"""Nested plain values that a user supplied (a YAML mapping, a form's values), checked as a whole before anything works on them."""

from __future__ import annotations

from typing import Any, cast

from backend.spec.user_input.documents import DEPTH, VALUES
from backend.spec.user_input.numbers import fits_a_float
from backend.spec.user_input.paths import is_text
from backend.spec.user_input.text import shown

_CONTAINERS = (list, tuple, dict)


def unusable(value: object) -> str:
    """Why nothing can work with a value, as the end of a sentence (“… contains a number beyond every limit”); "" if all is well.

    It finds text that no file can hold, whole numbers beyond the range of a float, nesting deeper than DEPTH, and more than VALUES parts.
    """
    level: list[Any] = [value]
    parts = 0
    for _ in range(DEPTH + 1):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, str):
                if not part.isascii() and not is_text(part):
                    return f"contains characters that are not valid text: {shown(part)}"
            elif isinstance(part, int):
                if not fits_a_float(part):
                    return f"contains {shown(part)}, which is beyond every limit"
            elif isinstance(part, dict):
                mapping = cast("dict[Any, Any]", part)
                inner += [*mapping, *mapping.values()]
            elif isinstance(part, _CONTAINERS):
                inner += cast("list[Any]", part)
        if not inner:
            return ""
        parts += len(inner)
        if parts > VALUES:
            return f"contains more than {VALUES:,} values"
        level = inner
    return f"is nested more than {DEPTH} levels deep"
