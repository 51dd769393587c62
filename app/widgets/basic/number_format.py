"""Numbers, durations and times as text: three significant digits, thin spaces, a dash for a missing value."""

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

DASH = "–"
MINUS = "−"
THIN = "\u202f"

_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def figure(x: object, unit: str = "") -> str:
    """`x` with three significant digits and its unit; integers below 100,000 keep all their digits."""
    number = finite(x)
    if number is None:
        return DASH
    factor, shown_unit = display_unit(unit, number)
    is_short_integer = factor == 1 and isinstance(x, int) and abs(x) < 100_000
    text = f"{x:,}".replace("-", MINUS) if is_short_integer else _digits(number * factor)
    return f"{text}{THIN}{shown_unit}" if shown_unit else text


def dollars(amount: float) -> str:
    return f"${amount:,.2f}"


def counted(number: int, noun: str) -> str:
    """“1 prompt”, “2 prompts”."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def display_unit(unit: str, number: float) -> tuple[int, str]:
    """(factor, unit shown) for a number of this size: multiply a value in `unit` by `factor` to get the unit shown."""
    if unit == "share":
        return 100, "%"
    return (1000, "MB") if unit == "GB" and 0 < abs(number) < 0.1 else (1, unit)


def signed(x: object) -> str:
    """A difference: as `figure`, with a sign unless it is 0."""
    number = finite(x)
    return f"{'+' if number > 0 else MINUS}{_digits(abs(number))}" if number else figure(x)


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


def short_duration(seconds: float) -> str:
    """A duration of at most some seconds: <1 ms, 23 ms, 4.56 s."""
    if seconds < 0.0005:
        return f"<{THIN}1{THIN}ms"
    return f"{round(seconds * 1000)}{THIN}ms" if seconds < 1 else figure(seconds, "s")


def file_size(size: object) -> str:
    """Bytes in the largest decimal unit, as file managers show them: 740 bytes, 12.3 kB, 4.56 GB."""
    number = finite(size)
    if number is None:
        return DASH
    for scale, letter in _SCALES:
        if number >= scale * 0.9995:
            return f"{_digits(number / scale)}{THIN}{letter}B"
    return f"{int(number)}{THIN}bytes"


def moment(t: object) -> str:
    """A unix time as “today 14:05”, “yesterday 14:05”, “3 Nov 14:05” or, in another year, “3 Nov 2025”."""
    number = finite(t)
    if number is None:
        return DASH
    then, now = datetime.fromtimestamp(number), datetime.now()
    days = (now.date() - then.date()) / timedelta(days=1)
    if days in (0, 1):
        return f"{'yesterday' if days else 'today'} {then:%H:%M}"
    return f"{then.day} {then:%b %H:%M}" if then.year == now.year else f"{then.day} {then:%b %Y}"


def ticks(values: Sequence[float]) -> list[str]:
    """Tick labels of an axis: short, all on one scale (4k, 8k, 12k; 2e−5, 4e−5)."""
    largest = max((abs(value) for value in values), default=0.0)
    if 0 < largest < 1e-3:
        return [_scientific(value, strip=True) if value else "0" for value in values]
    scale, letter = next(((s, c) for s, c in _SCALES if largest >= max(s, 10_000)), (1.0, ""))
    return ["0" if value == 0 else f"{value / scale:.6g}{letter}".replace("-", MINUS) for value in values]


def finite(x: object) -> float | None:
    """`x` as a float, or None if it is not a finite number."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        return None
    try:
        number = float(x)
    except OverflowError:  # an int beyond the range of a float
        return None
    return number if math.isfinite(number) else None


def _scientific(number: float, *, strip: bool = False) -> str:
    mantissa, _, exponent = f"{number:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if strip else mantissa
    return f"{mantissa}e{int(exponent)}".replace("-", MINUS)


def _digits(number: float) -> str:
    size = abs(number)
    if number == 0:
        return "0"
    if size < 1e-4:
        return _scientific(number)
    letter = ""
    if size >= 99_999.5:
        # 0.9995: a number that rounds to 1000 of a scale is shown as 1.00 of the next.
        scale, letter = next(((s, c) for s, c in _SCALES if size >= s * 0.9995), (1.0, ""))
        number, size = number / scale, size / scale
    elif size >= 999.5:
        return f"{round(number):,}".replace("-", MINUS)
    # Rounded before the logarithm: 9.999 becomes 10.0, with two digits before the point.
    integer_digits = math.floor(math.log10(float(f"{size:.2e}"))) + 1
    return f"{number:,.{max(0, 3 - integer_digits)}f}{letter}".replace("-", MINUS)
