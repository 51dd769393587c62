"""The line under a plot's title: each curve's colour, name and newest value. It wraps, and its figures do not dance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QFontMetricsF, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app import theme

_SWATCH, _GAP, _BETWEEN, _LINE_HEIGHT = 14.0, 5.0, 14.0, 16
_USUAL_VALUE = "0.000"
MAX_LINES = 4
"""Of a legend; the others are told by its tip, as a plot must have room for its curves."""


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One curve: the pen it is drawn with, its name, and its value as text."""

    pen: QPen
    label: str
    value: str


class Legend(QWidget):
    """Entries in reading order, as many lines as they need."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._entries: Sequence[LegendEntry] = ()
        self._font = theme.figures_font(theme.CAPTION)
        self._line = theme.scaled(_LINE_HEIGHT)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(self._line)

    def show_entries(self, entries: Sequence[LegendEntry]) -> None:
        self._entries = entries
        self._fit()
        hidden = len(entries) - sum(1 for _ in self._placed())
        self.setToolTip("\n".join(f"{one.label}  {one.value}" for one in entries) if hidden else "")
        self.update()

    def minimumSizeHint(self) -> QSize:
        return QSize(40, self._line)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        lines = max((line for line, _, _ in self._placed()), default=0) + 1
        if self.height() != lines * self._line:
            self.setFixedHeight(lines * self._line)

    def _placed(self) -> Iterator[tuple[int, float, LegendEntry]]:
        """(line, left edge, entry) of each that there is room for."""
        metrics, line, left = QFontMetricsF(self._font), 0, 0.0
        for entry in self._entries:
            width = self._label_width(metrics, entry) + _GAP + self._value_width(metrics, entry)
            if left and left + width > self.width():
                line, left = line + 1, 0.0
            if line == MAX_LINES:
                return
            yield line, left, entry
            left += width + _BETWEEN

    def _label_width(self, metrics: QFontMetricsF, entry: LegendEntry) -> float:
        wanted = _SWATCH + _GAP + metrics.horizontalAdvance(entry.label)
        return min(wanted, max(60.0, self.width() - _GAP - self._value_width(metrics, entry)))

    def _value_width(self, metrics: QFontMetricsF, entry: LegendEntry) -> float:
        return max(metrics.horizontalAdvance(entry.value), metrics.horizontalAdvance(_USUAL_VALUE))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(self._font)
        metrics = QFontMetricsF(self._font)
        for line, left, entry in self._placed():
            self._paint(painter, metrics, entry, left, line * self._line)

    def _paint(self, painter: QPainter, metrics: QFontMetricsF, entry: LegendEntry, left: float, top: float) -> None:
        pen = QPen(entry.pen)
        pen.setWidthF(2)
        painter.setPen(pen)
        middle = top + self._line / 2
        painter.drawLine(QPointF(left, middle), QPointF(left + _SWATCH, middle))
        room = self._label_width(metrics, entry) - _SWATCH - _GAP
        start = left + _SWATCH + _GAP
        painter.setPen(theme.palette().muted)
        label = metrics.elidedText(entry.label, Qt.TextElideMode.ElideMiddle, room + 0.5)
        where = Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft
        painter.drawText(QRectF(start, top, room + 1, self._line), where, label)
        painter.setPen(theme.palette().text)
        painter.drawText(QRectF(start + room + _GAP, top, metrics.horizontalAdvance(entry.value) + 2, self._line), where, entry.value)  # fmt: skip
