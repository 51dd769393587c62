"""Charts as files: a picture with title, axes and legend (PNG, SVG), or the numbers behind it (CSV)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
from PySide6.QtCore import QBuffer, QIODevice, QPoint, QRect
from PySide6.QtGui import QImage, QPainter
from PySide6.QtSvg import QSvgGenerator
from PySide6.QtWidgets import QWidget

from app import theme
from app.widgets.charts.trace import Trace
from backend.spec.whole_file import save_as

Format = Literal["png", "svg", "csv"]
FORMATS: dict[Format, str] = {"png": "PNG image", "svg": "SVG drawing", "csv": "CSV table"}
SHARPNESS = 2.0
"""Pixels of a PNG per pixel of the screen's layout."""
DPI = 96
CHUNK = 4096
"""Rows of a table that are written at a time."""


def write_png(chart: QWidget, path: Path) -> None:
    """Draw a chart's card into a PNG file. Raises DiskFault."""
    image = QImage(chart.size() * SHARPNESS, QImage.Format.Format_RGB32)
    image.setDevicePixelRatio(SHARPNESS)
    image.fill(theme.palette().card)
    chart.render(image, QPoint())
    buffer = QBuffer()
    buffer.open(QIODevice.OpenModeFlag.WriteOnly)
    image.save(buffer, "PNG")  # pyright: ignore[reportCallIssue, reportArgumentType]
    save_as(path, [bytes(buffer.data().data())])


def write_svg(chart: QWidget, path: Path, title: str) -> None:
    """Draw a chart's card into an SVG file: lines stay lines and text stays text. Raises DiskFault."""
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
    """Write the numbers of a chart. Raises DiskFault."""
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
