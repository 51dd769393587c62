"""The curves of a plot and their arithmetic: thinning that keeps peaks, smoothing, stacking, axis ranges."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from PySide6.QtGui import QPen

from app import theme

EMPTY = np.empty(0)


@dataclass(frozen=True, slots=True)
class Trace:
    """One curve: steps `x` `[n]`, ascending; values `y` `[n]`, NaN in gaps; a band from `low` to `high` `[n]`."""

    label: str
    colour: str  # a role of the palette, or reward:NAME for a reward function, reward:N for a compared run
    x: np.ndarray = field(default_factory=lambda: EMPTY)
    y: np.ndarray = field(default_factory=lambda: EMPTY)
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    stacked: bool = False  # an area on top of those before it
    column: str = ""  # its name in a table, if that is not the label

    @property
    def has_data(self) -> bool:
        return bool(np.isfinite(self.y).any())

    @property
    def pen(self) -> QPen:
        kind, _, name = self.colour.partition(":")
        if kind != "reward":
            return QPen(getattr(theme.palette(), self.colour))
        return theme.reward_pen(int(name) if name.isdigit() else name)

    def at(self, step: int | None) -> float | None:
        """The value at exactly `step`, None if there is none; with `step` None the newest of the last 64 values."""
        if step is None:
            newest = self.y[-64:][np.isfinite(self.y[-64:])]
            return float(newest[-1]) if len(newest) else None
        i = nearest_index(self.x, step)
        return float(self.y[i]) if i is not None and self.x[i] == step else None


def nearest_index(x: np.ndarray, step: float) -> int | None:
    """The index in `x` (ascending) of the value closest to `step`; None if `x` is empty."""
    return int(np.abs(x - step).argmin()) if len(x) else None


def steps_of(traces: Sequence[Trace]) -> np.ndarray:
    """The steps of the longest trace: a metric that appeared later has none at the beginning."""
    return max((trace.x for trace in traces), key=len, default=EMPTY)


def pile(traces: Sequence[Trace]) -> list[Trace]:
    """Lift each stacked trace onto those before it."""
    drawn: list[Trace] = []
    x, top = EMPTY, EMPTY
    for trace in traces:
        if not trace.stacked or (len(x) and not np.array_equal(trace.x, x)):
            drawn.append(trace)
            continue
        x, below = trace.x, top if len(top) else np.zeros(len(trace.x))
        top = below + np.nan_to_num(trace.y)
        drawn.append(replace(trace, y=np.where(np.isfinite(trace.y), top, np.nan), low=below, high=top))
    return drawn


@dataclass(frozen=True, slots=True)
class DrawnCurve:
    """A curve as it is painted: the line, the raw values behind it where they differ, and a band."""

    x: np.ndarray
    line: np.ndarray
    raw_x: np.ndarray = field(default_factory=lambda: EMPTY)
    raw: np.ndarray = field(default_factory=lambda: EMPTY)
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def thin(
    x: np.ndarray,
    y: np.ndarray,
    smoothed: np.ndarray | None = None,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
    most: int = 1000,
) -> DrawnCurve:
    """Reduce a curve `[n]` and its band to about `most` points."""
    size = -(-len(x) // max(1, most // 2))
    if size <= 2:
        raw_x, raw = (EMPTY, EMPTY) if smoothed is None else (x, y)
        return DrawnCurve(x, y if smoothed is None else smoothed, raw_x, raw, low, high)

    def buckets(column: np.ndarray) -> np.ndarray:
        return np.concatenate([column, np.full(-len(column) % size, np.nan)]).reshape(-1, size)

    starts = np.arange(0, len(x), size)
    middles = x[np.minimum(starts + size // 2, len(x) - 1)].astype(float)
    table = buckets(y if smoothed is None else smoothed)
    finite = np.isfinite(table)
    with np.errstate(invalid="ignore"):
        line = np.where(finite, table, 0.0).sum(axis=1) / finite.sum(axis=1)
    # The minimum is drawn before the maximum, whichever came first: a bucket is about a pixel wide.
    raw_x = np.stack([x[starts], middles], axis=1).reshape(-1)
    least, largest = np.fmin.reduce, np.fmax.reduce  # which ignore NaN without a warning
    raw = np.stack([least(buckets(y), axis=1), largest(buckets(y), axis=1)], axis=1).reshape(-1)
    bottom = None if low is None else least(buckets(low), axis=1)
    top = None if high is None else largest(buckets(high), axis=1)
    return DrawnCurve(middles, line, raw_x, raw, bottom, top)


def exponential_average(values: np.ndarray, weight: float) -> np.ndarray:
    """Exponential moving average of `values` `[n]` with decay `weight` (above 0, below 1)."""
    finite = np.isfinite(values)
    total = _decayed_sum(np.where(finite, values, 0.0), weight)
    count = _decayed_sum(finite.astype(float), weight)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(finite, total / count, np.nan)


def _decayed_sum(values: np.ndarray, weight: float) -> np.ndarray:
    """s[t] = weight · s[t−1] + values[t], vectorised by blocks."""
    block = max(1, int(np.log(1e-12) / np.log(weight)))
    powers = weight ** np.arange(block)
    padded = np.concatenate([values, np.zeros(-len(values) % block)]).reshape(-1, block)
    table = np.cumsum(padded / powers, axis=1) * powers
    carry = 0.0
    for sums in table:
        sums += carry * powers * weight
        carry = sums[-1]
    return table.reshape(-1)[: len(values)]


def axis_range(*columns: np.ndarray, unit: str = "", log: bool = False) -> tuple[float, float]:
    """(low, high) of an axis for the finite numbers, with a margin; it starts at 0 if they come near 0."""
    values = _finite(columns)
    if len(values) == 0:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    margin = (high - low) * 0.07 or abs(low) * 0.1 or 0.1
    starts_at_0 = not log and 0 <= low <= (high - low) * 0.5
    top = high + margin
    if unit == "share" and high <= 1 and not log:
        top = min(top, 1.02)  # above 100 % there is room for the width of the line, and no tick
    return (0.0 if starts_at_0 else low - margin), top


def _finite(columns: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([EMPTY, *(column[np.isfinite(column)] for column in columns)])


def log10(values: np.ndarray) -> np.ndarray:
    return np.log10(values, where=values > 0, out=np.full(len(values), np.nan))


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` ticks between two logarithms: 1, 2 and 5 times powers of ten, or powers alone."""
    found: list[float] = []
    for digits in ((1, 2, 5), (1,)):
        ticks = (power + float(np.log10(n)) for power in range(int(low) - 1, int(high) + 2) for n in digits)
        found = [tick for tick in ticks if low <= tick <= high]
        if 2 <= len(found) <= most:
            return found
    if len(found) < 2:  # less than a factor of two: ticks at round positions, uneven values
        return [low + (high - low) * share for share in (0.2, 0.5, 0.8)]
    return found[:: -(-len(found) // most)]
