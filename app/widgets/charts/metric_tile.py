"""Tiles: one figure each, large, with its difference from the start of the run below it."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QRect, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetrics, QPainter, QPaintEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QSizePolicy, QWidget

from app import theme
from app.widgets.basic.number_format import DASH, MINUS, THIN, figure, finite, signed

_FIGURE_PX = 20
_MARGIN = 12
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignBottom


class MetricTile(QFrame):
    """A label, a figure in the colour that its metric has in the charts, a caption.

    Where it is narrow the unit goes first, then the caption's words: the figures stay.
    """

    def __init__(self, label: str, role: str = "text", unit: str = "", help: str = "") -> None:
        super().__init__()
        self._label, self._role, self._unit, self._help = label, role, unit, help
        self._figure, self._captions = DASH, ("",)
        self.setProperty("role", "card")
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        theme.signals.changed.connect(self.update)
        self._describe()

    def show_value(self, now: float | None, start: float | None = None, instead: str = "") -> None:
        """The figure and how it differs from the run's start; `instead` says why there is none."""
        self._figure = figure(now, self._unit)
        if instead:
            self._captions = (instead, instead.partition(":")[0])
        else:
            change = _change(finite(now), finite(start), self._figure)
            self._captions = (f"{change} since the start", f"{change} since start", change) if change else ("",)
        self._describe()
        self.update()

    def figure(self) -> str:
        """The figure and its unit, as shown."""
        return self._figure

    def caption(self) -> str:
        return self._captions[0]

    def _describe(self) -> None:
        self.setToolTip(self._help)
        self.setAccessibleName(f"{self._label} {self._figure} {self._captions[0]}".strip())

    def sizeHint(self) -> QSize:
        return theme.scaled_size(QSize(150, 70))

    def minimumSizeHint(self) -> QSize:
        return theme.scaled_size(QSize(84, 70))

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        painter, colours = QPainter(self), theme.palette()
        room = self.width() - 2 * _MARGIN
        caption = theme.figures_font(theme.CAPTION)
        self._write(painter, caption, colours.muted, _band(6, 16, room), (self._label,))
        self._write(painter, caption, colours.muted, _band(47, 16, room), self._captions)
        self._write_figure(painter, _band(20, 27, room))

    def _write_figure(self, painter: QPainter, room: QRect) -> None:
        number, _, unit = self._figure.partition(THIN)
        font = theme.figures_font(_FIGURE_PX, QFont.Weight.DemiBold)
        colours = theme.palette()
        self._write(painter, font, getattr(colours, self._role) if number != DASH else colours.faint, room, (number,))
        start = QFontMetrics(font).horizontalAdvance(number) + 5
        small = theme.caption_font()
        if unit and start + QFontMetrics(small).horizontalAdvance(unit) <= room.width():
            self._write(painter, small, colours.muted, room.adjusted(start, 0, 0, -theme.scaled(4)), (unit,))

    def _write(self, painter: QPainter, font: QFont, colour: QColor, room: QRect, texts: Sequence[str]) -> None:
        """The first of the texts that fits, else as much of the last as does."""
        metrics = QFontMetrics(font)
        fitting = next((text for text in texts if metrics.horizontalAdvance(text) <= room.width()), None)
        shown = fitting if fitting is not None else metrics.elidedText(texts[-1], Qt.TextElideMode.ElideRight, room.width())  # fmt: skip
        painter.setFont(font)
        painter.setPen(colour)
        painter.drawText(room, _LEFT, shown)


class TileRow(QWidget):
    """Tiles of equal width, side by side."""

    def __init__(self, tiles: Sequence[MetricTile]) -> None:
        super().__init__()
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(theme.SPACE)
        for tile in tiles:
            row.addWidget(tile, 1)


def _band(top: int, height: int, width: int) -> QRect:
    """Where a line of a tile stands."""
    return QRect(_MARGIN, theme.scaled(top), width, theme.scaled(height))


def _change(now: float | None, start: float | None, shown: str) -> str:
    """The difference without its unit, with the decimals and in the unit of the figure above it; nothing where that leaves
    nothing."""
    if now is None or start is None:
        return ""
    number, _, unit = shown.partition(THIN)
    fraction = number.partition(".")[2] if now else "000"
    change = (now - start) * {"%": 100, "MB": 1000}.get(unit, 1)
    if not fraction.isdigit() and fraction:  # a large number, told with a letter for its scale
        return signed(change)
    size = f"{abs(change):,.{len(fraction)}f}"
    return f"{'+' if change > 0 else MINUS}{size}" if size.strip("0,.") else ""
