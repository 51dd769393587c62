"""Plain values of Python as JSON, out of a program's process and back: numbers, text, bytes, None, and collections of these.

`encoded` runs beside the program, which may have replaced anything in its process: what it says is only ever a claim. `decoded` runs where
the claim is checked, so it takes any JSON at all, and makes nothing but built-in types of limited size.
"""

from __future__ import annotations

import decimal
import fractions
import math
from collections import deque
from collections.abc import Callable
from typing import Any

MOST_HASHED = 4096
"""Elements of a set or a dict: chosen to collide, more of them would take seconds to put together."""
_EXACT = 1 << 53
"""Whole numbers up to here are the same in every reader of JSON."""


class NotPlain(ValueError):
    """The value is of another kind, or the JSON stands for none."""


def encoded(value: Any) -> Any:
    """JSON for a value; subclasses count as the built-in type that they equal. Raises NotPlain, RecursionError."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _EXACT else ["i", hex(value)]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ["f", repr(float(value))]
    for kinds, tag, parts in _COLLECTIONS:
        if isinstance(value, kinds):
            return [tag, *([encoded(part) for part in parts(value)])]
    for kind, tag, text in _SCALARS:
        if isinstance(value, kind):
            return [tag, text(value)]
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 0):
        return encoded(value.item())
    raise NotPlain(type(value).__name__)


def decoded(value: Any) -> Any:
    """The value that JSON of `encoded` stands for. Raises NotPlain, RecursionError."""
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if not isinstance(value, list) or not value or value[0] not in _DECODERS:
        raise NotPlain("no value")
    tag, *parts = value
    try:
        return _DECODERS[tag](parts)
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        raise NotPlain(str(error)) from None


def _pairs(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return list(value.items())


_COLLECTIONS: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (list, "l", list), (tuple, "t", list), (deque, "q", list), ((set, frozenset), "s", list), (dict, "d", _pairs),
]  # fmt: skip
_SCALARS: list[tuple[Any, str, Callable[[Any], str]]] = [
    ((bytes, bytearray), "b", lambda value: bytes(value).hex()),
    (complex, "c", lambda value: f"{value.real!r} {value.imag!r}"),
    (fractions.Fraction, "r", str),
    (decimal.Decimal, "n", str),
]


def _hashed(parts: list[Any]) -> list[Any]:
    if len(parts) > MOST_HASHED:
        raise NotPlain("too many elements")
    return [decoded(part) for part in parts]


def _fraction(text: str) -> fractions.Fraction:
    above, _, below = text.partition(
        "/"
    )  # from whole numbers: an exponent in the text could stand for a number of any size
    return fractions.Fraction(int(above), int(below or 1))


_DECODERS: dict[str, Callable[[list[Any]], Any]] = {
    "i": lambda parts: int(parts[0], 16),
    "f": lambda parts: float(parts[0]),
    "b": lambda parts: bytes.fromhex(parts[0]),
    "c": lambda parts: complex(*map(float, parts[0].split(" "))),
    "r": lambda parts: _fraction(parts[0]),
    "n": lambda parts: decimal.Decimal(parts[0]),
    "l": lambda parts: [decoded(part) for part in parts],
    "t": lambda parts: tuple(decoded(part) for part in parts),
    "q": lambda parts: deque(decoded(part) for part in parts),
    "s": lambda parts: set(_hashed(parts)),
    "d": lambda parts: dict(_hashed(parts)),
}
