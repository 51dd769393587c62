"""What a plot draws: traces of numbers over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from PySide6.QtGui import QPen

from app import theme

EMPTY = np.empty(0)


@dataclass(frozen=True, slots=True)
class Trace:
    """One curve: steps `x` `[n]`, ascending; values `y` `[n]`, NaN in gaps; optionally a band from `low` to `high` `[n]`.

    `colour` is a role of the palette, or `reward:N` for the colour of reward function N. A `stacked` trace is drawn as an area
    on top of the stacked ones before it. `columns`: what a table calls the curve, and the lower and upper edge of its band; () where that
    is made of the label.
    """

    label: str
    colour: str
    x: np.ndarray = field(default_factory=lambda: EMPTY)
    y: np.ndarray = field(default_factory=lambda: EMPTY)
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    stacked: bool = False
    columns: tuple[str, ...] = ()

    @property
    def has_data(self) -> bool:
        return bool(np.isfinite(self.y).any())

    @property
    def pen(self) -> QPen:
        kind, _, index = self.colour.partition(":")
        return theme.reward_pen(int(index)) if kind == "reward" else QPen(getattr(theme.palette(), self.colour))

    def at(self, step: int | None) -> float | None:
        """The value at exactly `step`, None if there is none; with `step` None the newest of the last 64 values."""
        if step is None:
            finite = np.flatnonzero(np.isfinite(self.y[-64:]))
            return float(self.y[-64:][finite[-1]]) if len(finite) else None
        i = nearest_index(self.x, step)
        return float(self.y[i]) if i is not None and self.x[i] == step else None


def nearest_index(x: np.ndarray, step: float) -> int | None:
    """The index in `x` (ascending) of the value closest to `step`; None if `x` is empty."""
    if len(x) == 0:
        return None
    right = int(np.searchsorted(x, step))
    neighbours = [i for i in (right - 1, right) if 0 <= i < len(x)]
    return min(neighbours, key=lambda i: abs(float(x[i]) - step))


def steps_of(traces: Sequence[Trace]) -> np.ndarray:
    """The steps of the longest trace: a metric that appeared later has none at the beginning."""
    return max((trace.x for trace in traces), key=len, default=EMPTY)


def pile(traces: Sequence[Trace]) -> list[Trace]:
    """The traces as they are drawn: each stacked one lifted onto those before it, with the area below it as its band.

    A gap counts as 0 in what lies above it. Traces over other steps than the first stacked one cannot be added to it, and stay
    as they are.
    """
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
