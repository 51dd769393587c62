"""Metric tiles: one large figure each, and below it the difference since the start of the run."""

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
    """A label, a figure in the colour of its metric in the charts, and a caption.

    A narrow tile drops the unit first, then shortens the caption; the digits stay.
    """

    def __init__(self, label: str, role: str = "text", unit: str = "", help: str = "") -> None:
        super().__init__()
        self._label, self._role, self._unit, self._help = label, role, unit, help
        self._figure, self._captions = DASH, ("",)  # captions from long to short; the first that fits is painted
        self.setProperty("role", "card")
        # Ignored: tiles share the row's width equally, and a longer figure must not widen its tile during a run.
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        theme.signals.changed.connect(self.update)
        self._describe()

    def show_value(self, now: float | None, start: float | None = None, instead: str = "") -> None:
        """Show the value and its difference from `start`; `instead` replaces the caption (why there is no value)."""
        self._figure = figure(now, self._unit)
        if instead:
            self._captions = (instead, instead.partition(":")[0])
        else:
            change = _change(finite(now), finite(start), self._figure)
            self._captions = (f"{change} since the start", f"{change} since start", change) if change else ("",)
        self._describe()
        self.update()

    def figure(self) -> str:
        """The value and its unit, as shown."""
        return self._figure

    def caption(self) -> str:
        """The caption in full, as shown where there is space."""
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
        width = self.width() - 2 * _MARGIN
        caption = theme.figures_font(theme.CAPTION)
        self._draw_fitting(painter, caption, colours.muted, _line_rect(6, 16, width), (self._label,))
        self._draw_fitting(painter, caption, colours.muted, _line_rect(47, 16, width), self._captions)
        self._draw_figure(painter, _line_rect(20, 27, width))

    def _draw_figure(self, painter: QPainter, rect: QRect) -> None:
        number, _, unit = self._figure.partition(THIN)
        font = theme.figures_font(_FIGURE_PX, QFont.Weight.DemiBold)
        colours = theme.palette()
        colour = getattr(colours, self._role) if number != DASH else colours.placeholder
        self._draw_fitting(painter, font, colour, rect, (number,))
        start = QFontMetrics(font).horizontalAdvance(number) + 5
        small = theme.caption_font()
        if unit and start + QFontMetrics(small).horizontalAdvance(unit) <= rect.width():
            # Both texts are aligned to the bottom of their line; the small font's baseline would be too low.
            self._draw_fitting(painter, small, colours.muted, rect.adjusted(start, 0, 0, -theme.scaled(4)), (unit,))

    def _draw_fitting(self, painter: QPainter, font: QFont, colour: QColor, rect: QRect, texts: Sequence[str]) -> None:
        """Draw the first of `texts` that fits into `rect`, else the last one elided."""
        metrics, width = QFontMetrics(font), rect.width()
        fitting = next((text for text in texts if metrics.horizontalAdvance(text) <= width), None)
        if fitting is None:
            fitting = metrics.elidedText(texts[-1], Qt.TextElideMode.ElideRight, width)
        painter.setFont(font)
        painter.setPen(colour)
        painter.drawText(rect, _LEFT, fitting)


class TileRow(QWidget):
    """Tiles of equal width, side by side."""

    def __init__(self, tiles: Sequence[MetricTile]) -> None:
        super().__init__()
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(theme.SPACE)
        for tile in tiles:
            row.addWidget(tile, 1)


def _line_rect(top: int, height: int, width: int) -> QRect:
    """The rectangle of a line of text in a tile; `top` and `height` before scaling with the text size."""
    return QRect(_MARGIN, theme.scaled(top), width, theme.scaled(height))


def _change(now: float | None, start: float | None, shown: str) -> str:
    """The signed difference with the decimals and in the unit of the figure `shown`, but without the unit; "" for zero."""
    if now is None or start is None:
        return ""
    number, _, unit = shown.partition(THIN)
    fraction = number.partition(".")[2] if now else "000"
    change = (now - start) * {"%": 100, "MB": 1000}.get(unit, 1)
    if not fraction.isdigit() and fraction:  # a large number that has a letter for its scale
        return signed(change)
    size = f"{abs(change):,.{len(fraction)}f}"
    return f"{'+' if change > 0 else MINUS}{size}" if size.strip("0,.") else ""
