"""Metrics by step as columns of float64: one per metric, all as long as the column of steps.

It knows no Qt, no files and no metric names. Where a step lacks a metric its value is NaN, which charts draw as a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np

_FIRST_CAPACITY = 1024
_BATCH = 256
"""Rows that wait as dicts before they are stored together: numpy converts a table of them in a tenth of the time that it takes to
store their values one by one."""
_PLAIN: set[type] = {int, float, type(None)}
"""Types that numpy converts as `number` does."""

Row = tuple[int, Mapping[str, Any]]


class Series:
    """Growing columns of float64; appending is amortised constant, reading is a view and costs nothing."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._size = 0
        self._last: int | None = None
        self._steps = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._columns: dict[str, np.ndarray] = {}
        self._waiting: list[Row] = []

    def __len__(self) -> int:
        return self._size + len(self._waiting)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a step. A step that exists already is replaced, and all after it are dropped: steps only rise.

        `values` is kept for a while, and must not be changed afterwards.
        """
        if self._last is not None and step <= self._last:
            self._truncate(step)
        self._waiting.append((step, values))
        self._last = step
        if len(self._waiting) >= _BATCH:
            self._store()

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last step, or None while there is none."""
        self._store()
        return (int(self._steps[0]), int(self._steps[self._size - 1])) if self._size else None

    def names(self) -> list[str]:
        """Every metric so far, in the order of its first appearance."""
        self._store()
        return list(self._columns)

    def get(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps `[n]` int64, values `[n]` float64 with NaN in gaps), read-only; both empty for an unknown name."""
        self._store()
        column = self._columns.get(name)
        if column is None:
            return _read_only(self._steps[:0]), np.empty(0)
        return _read_only(self._steps[: self._size]), _read_only(column[: self._size])

    def latest(self, name: str) -> float | None:
        """The last finite value, or None."""
        return self._finite(name, -1)

    def first(self, name: str) -> float | None:
        """The first finite value, or None."""
        return self._finite(name, 0)

    def _finite(self, name: str, index: int) -> float | None:
        values = self.get(name)[1]
        ends = (
            values[:64] if index == 0 else values[-64:]
        )  # nearly always one of the last values; a run may have a hundred thousand
        for part in (ends, values):
            finite = part[np.isfinite(part)]
            if len(finite):
                return float(finite[index])
        return None

    def _store(self) -> None:
        """Move the rows that wait into the columns; those with the same metrics, which nearly all have, together."""
        waiting, self._waiting = self._waiting, []
        for names, rows in groupby(waiting, key=lambda row: tuple(row[1])):
            self._store_table(names, list(rows))

    def _store_table(self, names: Sequence[str], rows: Sequence[Row]) -> None:
        end = self._size + len(rows)
        while end > len(self._steps):
            self._grow()
        self._steps[self._size : end] = [step for step, _ in rows]
        table = _table([values.values() for _, values in rows], len(names))
        for name in names:
            if name not in self._columns:
                self._columns[name] = np.empty(len(self._steps))
                self._columns[name][: self._size] = np.nan
        values = dict(zip(names, table.T, strict=True))
        for name, column in self._columns.items():
            column[self._size : end] = values.get(name, np.nan)
        self._size = end

    def _truncate(self, step: int) -> None:
        self._store()
        self._size = int(np.searchsorted(self._steps[: self._size], step))

    def _grow(self) -> None:
        """Double the capacity. What lies beyond the size is never written here: touching it would hold up the event loop."""
        self._steps = _doubled(self._steps, self._size)
        for name, column in self._columns.items():
            self._columns[name] = _doubled(column, self._size)


def _doubled(column: np.ndarray, size: int) -> np.ndarray:
    larger = np.empty(2 * len(column), dtype=column.dtype)
    larger[:size] = column[:size]
    return larger


def _table(rows: Sequence[Iterable[Any]], width: int) -> np.ndarray:
    """Values `[rows, width]` as float64; NaN for anything but a finite number."""
    cells = list(chain.from_iterable(rows))
    if set(map(type, cells)) <= _PLAIN:
        try:
            table = np.array(cells, dtype=float).reshape(len(rows), width)
        except OverflowError:  # an int beyond the range of a float
            pass
        else:
            table[np.isinf(table)] = np.nan
            return table
    return np.array([number(cell) for cell in cells]).reshape(len(rows), width)


def number(value: Any) -> float:
    """`value` as a float; NaN for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
