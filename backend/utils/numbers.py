"""Numbers that a user supplied."""

from __future__ import annotations

import math

from backend.utils.errors import UserError
from backend.utils.text import quote

_DIGITS = 30
"""Digits of the longest whole number in a text: Python raises ValueError for more than 4,300."""


def whole_number(value: object, setting: str) -> int:
    """A whole number; 3.0 is one, true and "3" are none. Raises UserError for anything else, and for one beyond the range of a float
    (about 1.8e308), which no arithmetic with floats could use."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits_a_float(value) or value != int(value):
        raise UserError(setting, f"{setting} must be a whole number, not {quote(value)}.")
    return int(value)


def written_whole(text: str) -> int | None:
    """The whole number that a text writes in decimal digits; None for any other text, and for more digits than any limit of ours has."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS else None


def number(value: object, setting: str) -> float:
    """A finite number as a float. Raises UserError for anything else, and for a whole number beyond the range of a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits_a_float(value):
        raise UserError(setting, f"{setting} must be a number, not {quote(value)}.")
    return float(value)


def fits_a_float(value: float) -> bool:
    """Whether a number is finite as a float. An int of any size may be asked."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
