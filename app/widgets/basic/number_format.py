"""Numbers as people read them: three significant digits, thin units, a dash where there is nothing.

Text only: no colours, no widgets. Whatever stands in a diary can be passed; nothing here ever says NaN or None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

DASH = "–"
MINUS = "−"
THIN = "\u202f"
"""Narrow space that does not break, between a figure and its unit."""

_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def figure(x: object, unit: str = "") -> str:
    """`x` with three significant digits and its unit; whole numbers below 100,000 keep all theirs.

    A `share` (0 to 1) is shown in percent, less than a tenth of a GB in MB. What is no finite number is a dash, without a
    unit.
    """
    number = finite(x)
    if number is None:
        return DASH
    factor, word = display_unit(unit, number)
    text = _whole(x) if factor == 1 and isinstance(x, int) and abs(x) < 100_000 else _digits(number * factor)
    return f"{text}{THIN}{word}" if word else text


def display_unit(unit: str, number: float) -> tuple[int, str]:
    """The unit in which a number of this size is told, as a word, and how many of them make one of `unit`."""
    if unit == "share":
        return 100, "%"
    return (1000, "MB") if unit == "GB" and 0 < abs(number) < 0.1 else (1, unit)


def signed(x: object, unit: str = "") -> str:
    """A difference: as `figure`, with its sign always there (±0 has none)."""
    number = finite(x)
    if number is None or number == 0:
        return figure(x, unit)
    if unit == "share":
        return f"{_with_sign(number * 100)}{THIN}points"
    return f"{_with_sign(number)}{THIN}{unit}" if unit else _with_sign(number)


def duration(seconds: object) -> str:
    """A span of time in its two largest units: 0.4 s, 42 s, 4 min 20 s, 2 h 05 min, 1 d 3 h."""
    number = finite(seconds)
    if number is None or number < 0:
        return DASH
    if number < 1:
        return f"{number:.1f}{THIN}s"
    whole = round(number)
    if whole < 60:
        return f"{whole}{THIN}s"
    if whole < 3600:
        return f"{whole // 60}{THIN}min {whole % 60:02d}{THIN}s"
    minutes = round(whole / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}{THIN}h {minutes % 60:02d}{THIN}min"
    hours = round(whole / 3600)
    return f"{hours // 24}{THIN}d {hours % 24}{THIN}h"


def moment(t: object, now: datetime | None = None) -> str:
    """A unix time as “today 14:05”, “yesterday 14:05”, “3 Nov 14:05” or, in another year, “3 Nov 2025”."""
    number = finite(t)
    if number is None:
        return DASH
    then, now = datetime.fromtimestamp(number), now or datetime.now()
    days = (now.date() - then.date()) / timedelta(days=1)
    if days == 0:
        return f"today {then:%H:%M}"
    if days == 1:
        return f"yesterday {then:%H:%M}"
    return f"{then.day} {then:%b %H:%M}" if then.year == now.year else f"{then.day} {then:%b %Y}"


def ticks(values: Sequence[float]) -> list[str]:
    """The figures of an axis: short, all on one scale (4k, 8k, 12k; 2e−5, 4e−5), with a real minus sign."""
    largest = max((abs(value) for value in values), default=0.0)
    if 0 < largest < 1e-3:
        return [_scientific(value) for value in values]
    scale, letter = next(((s, c) for s, c in _SCALES if largest >= max(s, 10_000)), (1.0, ""))
    return ["0" if value == 0 else f"{value / scale:.4g}{letter}".replace("-", MINUS) for value in values]


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", MINUS) if value else "0"


def finite(x: object) -> float | None:
    """`x` as a float, or None when it is no finite number."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        return None
    try:
        number = float(x)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(x: int) -> str:
    return f"{x:,}".replace("-", MINUS)


def _with_sign(number: float) -> str:
    return f"{'+' if number > 0 else MINUS}{_digits(abs(number))}"


def _digits(number: float) -> str:
    """Three significant digits; from 1,000 on all whole ones, from 100,000 on with a letter for the scale."""
    if number == 0:
        return "0"
    size = abs(number)
    if size < 1e-4:
        mantissa, _, exponent = f"{number:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", MINUS)
    if size >= 99_999.5:
        scale, letter = next(((s, c) for s, c in _SCALES if size >= s * 0.9995), (1.0, ""))
        return f"{_places(number / scale)}{letter}"
    return _whole(round(number)) if size >= 999.5 else _places(number)


def _places(number: float) -> str:
    """Three significant digits of a number below a thousand, as decimals."""
    size = abs(number)
    before = 0 if size == 0 else math.floor(math.log10(float(f"{size:.2e}"))) + 1
    return f"{number:,.{max(0, 3 - before)}f}".replace("-", MINUS)
