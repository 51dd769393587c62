"""Numbers, durations and times as text: three significant digits, thin spaces before units, a dash for a missing value.

Any value of an event log can be passed: null, NaN and text give a dash, never “NaN” or “None”.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

DASH = "–"
MINUS = "−"
THIN = "\u202f"
"""Narrow no-break space (U+202F), between a figure and its unit."""

_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def figure(x: object, unit: str = "") -> str:
    """`x` with three significant digits and its unit; integers below 100,000 keep all their digits.

    The unit `share` (0 to 1) is shown in percent, and less than 0.1 GB in MB. Anything but a finite number is a dash
    without a unit.
    """
    number = finite(x)
    if number is None:
        return DASH
    factor, shown_unit = display_unit(unit, number)
    text = _integer(x) if factor == 1 and isinstance(x, int) and abs(x) < 100_000 else _digits(number * factor)
    return f"{text}{THIN}{shown_unit}" if shown_unit else text


def display_unit(unit: str, number: float) -> tuple[int, str]:
    """(factor, unit shown) for a number of this size: multiply a value in `unit` by `factor` to get the unit shown."""
    if unit == "share":
        return 100, "%"
    return (1000, "MB") if unit == "GB" and 0 < abs(number) < 0.1 else (1, unit)


def signed(x: object, unit: str = "") -> str:
    """A difference: as `figure`, but always with a sign; 0 has none. A difference of shares is in percentage points."""
    number = finite(x)
    if number is None or number == 0:
        return figure(x, unit)
    if unit == "share":
        return f"{_with_sign(number * 100)}{THIN}points"
    return f"{_with_sign(number)}{THIN}{unit}" if unit else _with_sign(number)


def duration(seconds: object) -> str:
    """A duration in its two largest units: 0.4 s, 42 s, 4 min 20 s, 2 h 05 min, 1 d 3 h."""
    number = finite(seconds)
    if number is None or number < 0:
        return DASH
    if number < 1:
        return f"{number:.1f}{THIN}s"
    total_s = round(number)
    if total_s < 60:
        return f"{total_s}{THIN}s"
    if total_s < 3600:
        return f"{total_s // 60}{THIN}min {total_s % 60:02d}{THIN}s"
    minutes = round(total_s / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}{THIN}h {minutes % 60:02d}{THIN}min"
    hours = round(total_s / 3600)
    return f"{hours // 24}{THIN}d {hours % 24}{THIN}h"


def file_size(size: object) -> str:
    """Bytes in the largest decimal unit, as file managers show them: 740 bytes, 12.3 kB, 4.56 GB."""
    number = finite(size)
    if number is None:
        return DASH
    scale, unit = next(
        ((s, u) for s, u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if number >= s * 0.9995), (1, "bytes")
    )
    return f"{_digits(number / scale)}{THIN}{unit}" if scale > 1 else f"{int(number)}{THIN}{unit}"


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
    """Tick labels of an axis: short, all on one scale (4k, 8k, 12k; 2e−5, 4e−5), with a typographic minus."""
    largest = max((abs(value) for value in values), default=0.0)
    if 0 < largest < 1e-3:
        return [_scientific(value) for value in values]
    scale, letter = next(((s, c) for s, c in _SCALES if largest >= max(s, 10_000)), (1.0, ""))
    return ["0" if value == 0 else f"{value / scale:.4g}{letter}".replace("-", MINUS) for value in values]


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", MINUS) if value else "0"


def finite(x: object) -> float | None:
    """`x` as a float, or None if it is not a finite number. A bool is not a number here."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        return None
    try:
        number = float(x)
    except OverflowError:  # an int beyond the range of a float
        return None
    return number if math.isfinite(number) else None


def _integer(x: int) -> str:
    return f"{x:,}".replace("-", MINUS)


def _with_sign(number: float) -> str:
    return f"{'+' if number > 0 else MINUS}{_digits(abs(number))}"


def _digits(number: float) -> str:
    """Three significant digits; from 1,000 on all integer digits, from 100,000 on with a letter for the scale."""
    if number == 0:
        return "0"
    size = abs(number)
    if size < 1e-4:
        mantissa, _, exponent = f"{number:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", MINUS)
    if size >= 99_999.5:
        # 0.9995: what rounds to 1000 of a scale is shown as 1.00 of the next.
        scale, letter = next(((s, c) for s, c in _SCALES if size >= s * 0.9995), (1.0, ""))
        return f"{_decimal(number / scale)}{letter}"
    return _integer(round(number)) if size >= 999.5 else _decimal(number)


def _decimal(number: float) -> str:
    """Three significant digits of a number below a thousand, without an exponent."""
    size = abs(number)
    # Rounded before the logarithm: 9.999 becomes 10.0, with two digits before the point and not one.
    integer_digits = 0 if size == 0 else math.floor(math.log10(float(f"{size:.2e}"))) + 1
    return f"{number:,.{max(0, 3 - integer_digits)}f}".replace("-", MINUS)
