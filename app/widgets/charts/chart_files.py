"""Charts as files: a picture with title, axes and legend (PNG, SVG), or the numbers behind it (CSV)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
from PySide6.QtCore import QBuffer, QIODevice, QPoint, QRect
from PySide6.QtGui import QImage, QPainter, QPen
from PySide6.QtSvg import QSvgGenerator
from PySide6.QtWidgets import QWidget

from app import theme
from backend.utils.whole_file import save_as

# What a plot draws: traces of numbers over steps.

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


# ── chart files ──────────────────────────────────────────────────────────────────────────────────────────────────────

Format = Literal["png", "svg", "csv"]
FORMATS: dict[Format, str] = {"png": "PNG image", "svg": "SVG drawing", "csv": "CSV table"}
SHARPNESS = 2.0
"""Pixels of a PNG per pixel of the screen's layout."""
DPI = 96
CHUNK = 4096
"""Rows of a table that are written at a time."""


def write_png(chart: QWidget, path: Path) -> None:
    """Draw a chart's card into a PNG file. Raises DiskError."""
    image = QImage(chart.size() * SHARPNESS, QImage.Format.Format_RGB32)
    image.setDevicePixelRatio(SHARPNESS)
    image.fill(theme.palette().card)
    chart.render(image, QPoint())
    buffer = QBuffer()
    buffer.open(QIODevice.OpenModeFlag.WriteOnly)
    image.save(buffer, "PNG")  # pyright: ignore[reportCallIssue, reportArgumentType]
    save_as(path, [bytes(buffer.data().data())])


def write_svg(chart: QWidget, path: Path, title: str) -> None:
    """Draw a chart's card into an SVG file: lines stay lines and text stays text. Raises DiskError."""
    buffer = QBuffer()
    generator = QSvgGenerator()
    generator.setOutputDevice(buffer)
    generator.setSize(chart.size())
    generator.setViewBox(QRect(QPoint(), chart.size()))
    generator.setResolution(DPI)
    generator.setTitle(title)
    painter = QPainter(generator)
    painter.fillRect(chart.rect(), theme.palette().card)
    chart.render(painter, QPoint())
    painter.end()
    save_as(path, [bytes(buffer.data().data())])


def write_csv(traces: Sequence[Trace], path: Path) -> None:
    """Write the numbers of a chart. Raises DiskError."""
    text = io.StringIO()
    write_table(traces, text)
    save_as(path, text.getvalue())


def write_table(traces: Sequence[Trace], file: TextIO) -> None:
    """A row for each step, a column for each curve and each edge of a band; gaps are empty cells."""
    writer = csv.writer(file, lineterminator="\n")
    columns = [column for trace in traces for column in _columns(trace)]
    writer.writerow(["step", *(name for name, _, _ in columns)])
    for rows in _chunks([(x, y) for _, x, y in columns]):
        writer.writerows(rows)


def _columns(trace: Trace) -> list[tuple[str, np.ndarray, np.ndarray]]:
    names = trace.columns or (trace.label, f"{trace.label} low", f"{trace.label} high")
    parts = zip(names, (trace.y, trace.low, trace.high), strict=False)  # without a band there may be one name
    return [(name, trace.x, values) for name, values in parts if values is not None]


def _chunks(columns: Sequence[tuple[np.ndarray, np.ndarray]]) -> Iterator[list[list[object]]]:
    """Rows [step, cell, …] over the union of all steps, CHUNK at a time."""
    steps = np.unique(np.concatenate([x for x, _ in columns])) if columns else np.empty(0)
    table = np.full((len(columns), len(steps)), np.nan)
    for row, (x, y) in zip(table, columns, strict=True):
        row[np.searchsorted(steps, x)] = y
    for start in range(0, len(steps), CHUNK):
        cells = [column.tolist() for column in table[:, start : start + CHUNK]]
        numbers = steps[start : start + CHUNK].astype(int).tolist()
        # repr of a float is the shortest text that reads back as the same number; NaN is not equal to itself.
        yield [
            [step, *("" if cell != cell else repr(cell) for cell in row)]
            for step, *row in zip(numbers, *cells, strict=True)
        ]
