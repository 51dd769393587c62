"""Charts as files: a picture with title, axes and legend (PNG, SVG), or the numbers behind it (CSV)."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from PySide6.QtCore import QBuffer, QIODevice, QPoint, QRect
from PySide6.QtGui import QImage, QPainter
from PySide6.QtSvg import QSvgGenerator
from PySide6.QtWidgets import QWidget

from app import theme
from app.widgets.charts.curves import EMPTY, Trace
from backend.utils.disk import save_as

Format = Literal["png", "svg", "csv"]
FORMATS: dict[Format, str] = {"png": "PNG image", "svg": "SVG drawing", "csv": "CSV table"}
SHARPNESS = 2.0
CHUNK = 4096


def write_chart(chart: QWidget, title: str, traces: Sequence[Trace], path: Path, format: Format) -> None:
    """Write a chart's card as a picture, or its traces as a table. Raises DiskError."""
    if format == "csv":
        save_as(path, table_text(traces))
        return
    buffer = QBuffer()
    if format == "png":
        image = QImage(chart.size() * SHARPNESS, QImage.Format.Format_RGB32)
        image.setDevicePixelRatio(SHARPNESS)
        image.fill(theme.palette().card)
        chart.render(image, QPoint())
        buffer.open(QIODevice.OpenModeFlag.WriteOnly)
        image.save(buffer, "PNG")  # pyright: ignore[reportCallIssue, reportArgumentType]
    else:
        generator = QSvgGenerator()
        generator.setOutputDevice(buffer)
        generator.setSize(chart.size())
        generator.setViewBox(QRect(QPoint(), chart.size()))
        generator.setResolution(96)
        generator.setTitle(title)
        painter = QPainter(generator)
        painter.fillRect(chart.rect(), theme.palette().card)
        chart.render(painter, QPoint())
        painter.end()
    save_as(path, [bytes(buffer.data().data())])


def table_text(traces: Sequence[Trace]) -> str:
    """CSV with a row for each step, a column for each curve and each edge of a band."""
    columns: list[tuple[str, np.ndarray, np.ndarray]] = []
    for trace in traces:
        names = trace.columns or (trace.label, f"{trace.label} low", f"{trace.label} high")
        parts = zip(names, (trace.y, trace.low, trace.high), strict=False)  # without a band there may be one name
        columns += [(name, trace.x, values) for name, values in parts if values is not None]
    steps = np.unique(np.concatenate([EMPTY, *(x for _, x, _ in columns)]))
    table = np.full((len(columns), len(steps)), np.nan)
    for cells, (_, x, y) in zip(table, columns, strict=True):
        cells[np.searchsorted(steps, x)] = y
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *(name for name, _, _ in columns)])
    for start in range(0, len(steps), CHUNK):
        rows = table[:, start : start + CHUNK].T.tolist()
        numbers = steps[start : start + CHUNK].astype(int).tolist()
        # repr of a float is the shortest text that reads back as the same number; NaN is not equal to itself.
        writer.writerows(
            [step, *("" if x != x else repr(x) for x in cells)] for step, cells in zip(numbers, rows, strict=True)
        )
    return text.getvalue()
