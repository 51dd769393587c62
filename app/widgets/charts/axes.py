"""The two axes of a plot: values with short labels, linear or logarithmic, and steps or working time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyqtgraph as pg
from PySide6.QtCore import QRectF

from app.widgets.basic.number_format import THIN, display_unit, duration, figure, ticks

OVERHANG = 10
"""How far a tick label may reach beyond the end of its axis."""
_SMALL = 1e-2
"""Below this the power of ten is written once, in the title: labels such as 4.5e−4 would run into it."""
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class ValueAxis(pg.AxisItem):
    """The value axis: short labels, shares in percent, the unit chosen by the largest value."""

    def __init__(self, title: str, unit: str) -> None:
        super().__init__("left")
        self._title, self._unit = title, unit
        self._factor = 1.0
        self._is_log = False

    def set_scale_of(self, largest: float, *, log: bool) -> None:
        """Choose unit and power of ten for values up to `largest`. On a logarithmic axis the view's values are the logarithms to
        the base of 10, and labels are the values themselves."""
        factor, unit = display_unit(self._unit, largest)
        title = unit if self._title == self._unit else self._title
        power = 0
        if not log and 0 < largest * factor < _SMALL:
            power = math.floor(math.log10(largest * factor))
            title = f"{title}, 10{str(power).translate(_SUPERSCRIPT)}"
        self._factor, self._is_log = factor / 10**power, log
        if title != self.labelText:
            self.setLabel(title, **self.labelStyle)

    @property
    def untouched_title(self) -> str:
        """The title at first, before a unit or a power of ten was chosen."""
        return self._title

    def boundingRect(self) -> QRectF:
        # With a grid, pyqtgraph's rectangle has no space for half of the lowest and the highest label, and drops both.
        return super().boundingRect().adjusted(0, -OVERHANG, 0, OVERHANG)

    def tickValues(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, list[float]]]:
        if self._is_log:
            return [(1.0, log_ticks(minVal, maxVal, most=max(2, int(size / 24))))]
        return super().tickValues(minVal, maxVal, size)

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        if self._is_log:
            return [_log_label(10**value * self._factor) for value in values]
        # Rounded to multiples of the spacing: pyqtgraph's values carry float error, and 0.30000000000000004 is no label.
        return ticks([float(f"{round(value / spacing) * spacing * self._factor:.6g}") for value in values])


_TIME_SPACINGS = (
    1,
    2,
    5,
    10,
    15,
    30,
    *(60 * n for n in (1, 2, 5, 10, 15, 30)),
    *(3600 * n for n in (1, 2, 3, 6, 12)),
    86_400,
)
"""Seconds between ticks that are round on a clock; beyond the last, whole days."""
_TIME_LABEL = 75
"""Width in pixels that a label such as “2 h 05 min” needs."""


class StepAxis(pg.AxisItem):
    """The horizontal axis: whole numbers, of steps or of what else a comparison counts; with `is_time` seconds, whose ticks are round on a
    clock and labelled as durations."""

    is_time = False

    def tickSpacing(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, float]]:
        if self.is_time:
            least = (maxVal - minVal) * _TIME_LABEL / max(size, _TIME_LABEL)
            return [(next((n for n in _TIME_SPACINGS if n >= least), 86_400 * math.ceil(least / 86_400)), 0)]
        levels = super().tickSpacing(minVal, maxVal, size) or []
        return [(max(1.0, spacing), 0) for spacing, _ in levels[:1]]

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        if self.is_time:
            return [_clock_label(float(value)) for value in values]
        return [f"{value:,.0f}" for value in values]


def _clock_label(seconds: float) -> str:
    """A duration without a part that is 0: “0”, “30 s”, “5 min”, “2 h”, “1 h 30 min”."""
    if seconds <= 0:
        return "0"
    text = duration(seconds)
    for zero in (f" 00{THIN}s", f" 00{THIN}min", f" 0{THIN}h"):
        text = text.removesuffix(zero)
    return text


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` ticks between the logarithms `low` and `high`: powers of ten, every second or third of them where there are
    many, and 2 and 5 times powers of ten where there are few."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    inside = [float(power) for power in decades if low <= power <= high]
    if len(inside) >= 3 or high - low > 3:
        return inside[:: -(-len(inside) // most)]
    fine = [power + math.log10(times) for power in decades for times in (1, 2, 5)]
    fine = [tick for tick in fine if low <= tick <= high]
    if len(fine) < 2:  # less than a factor of two: ticks at round values, unevenly spaced
        step = (high - low) / 3
        return [low + step * i for i in (0.5, 1.5, 2.5)]
    return fine if len(fine) <= most else inside or fine[:: -(-len(fine) // most)]


def _log_label(value: float) -> str:
    if not 1e-3 <= value < 1e5:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        power = f"10{str(int(exponent)).translate(_SUPERSCRIPT)}"
        return power if mantissa == "1" else f"{mantissa}·{power}"
    return f"{value:,.3g}" if value < 1000 else figure(value)
