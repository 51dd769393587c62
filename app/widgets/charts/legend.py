"""The legend under a plot's title: colour, name and value of each curve. It wraps, up to a few lines. A click hides or shows a curve.

Every value takes at least the width of a usual one, so the entries do not move while digits change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QFont, QFontMetricsF, QMouseEvent, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app import theme
from app.widgets.basic.labels import plain_tip

_SWATCH, _GAP, _BETWEEN, _LINE_HEIGHT = 14.0, 5.0, 14.0, 16
_USUAL_VALUE = "0.000"
MAX_LINES = 4
"""Entries beyond these lines are only in the tool tip: the curves need the space."""


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One curve: its pen, its name, and its value as text."""

    pen: QPen
    label: str
    value: str
    hidden: bool = False
    """Whether its curve is hidden: the entry stays, crossed out."""


class Legend(QWidget):
    """Entries in reading order, on as many lines as they need, up to MAX_LINES.

    Signals:
        clicked(str) – the entry with this label was clicked.
    """

    clicked = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._entries: Sequence[LegendEntry] = ()
        self._font = theme.figures_font(theme.CAPTION)
        self._line = theme.scaled(_LINE_HEIGHT)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(self._line)
        self.setMouseTracking(True)

    def show_entries(self, entries: Sequence[LegendEntry]) -> None:
        self._entries = entries
        self._fit()
        hidden = len(entries) - sum(1 for _ in self._positions())
        self.setToolTip(plain_tip("\n".join(f"{entry.label}  {entry.value}" for entry in entries)) if hidden else "")
        self.update()

    def label_at(self, pos: QPointF) -> str:
        """The label of the entry at this place; "" beside all of them."""
        metrics = QFontMetricsF(self._font)
        for line, left, entry in self._positions():
            width = self._label_width(metrics, entry) + _GAP + metrics.horizontalAdvance(entry.value)
            if QRectF(left, line * self._line, width, self._line).contains(pos):
                return entry.label
        return ""

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        on_entry = bool(self.label_at(event.position()))
        self.setCursor(Qt.CursorShape.PointingHandCursor if on_entry else Qt.CursorShape.ArrowCursor)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        name = self.label_at(event.position())
        if name and event.button() == Qt.MouseButton.LeftButton:
            self.clicked.emit(name)

    def minimumSizeHint(self) -> QSize:
        return QSize(40, self._line)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        lines = max((line for line, _, _ in self._positions()), default=0) + 1
        if self.height() != lines * self._line:
            self.setFixedHeight(lines * self._line)

    def _positions(self) -> Iterator[tuple[int, float, LegendEntry]]:
        """(line, left edge, entry) of each entry that fits."""
        metrics, line, left = QFontMetricsF(self._font), 0, 0.0
        for entry in self._entries:
            width = self._label_width(metrics, entry) + _GAP + self._value_width(metrics, entry)
            if left and left + width > self.width():  # the first entry of a line stays, however wide: it is elided
                line, left = line + 1, 0.0
            if line == MAX_LINES:
                return
            yield line, left, entry
            left += width + _BETWEEN

    def _label_width(self, metrics: QFontMetricsF, entry: LegendEntry) -> float:
        full = _SWATCH + _GAP + metrics.horizontalAdvance(entry.label)
        return min(full, max(60.0, self.width() - _GAP - self._value_width(metrics, entry)))

    def _value_width(self, metrics: QFontMetricsF, entry: LegendEntry) -> float:
        # Tabular figures: values of as many digits are equally wide, so only a longer one moves the entries after it.
        return max(metrics.horizontalAdvance(entry.value), metrics.horizontalAdvance(_USUAL_VALUE))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(self._font)
        metrics = QFontMetricsF(self._font)
        for line, left, entry in self._positions():
            self._paint_entry(painter, metrics, entry, left, line * self._line)

    def _paint_entry(
        self, painter: QPainter, metrics: QFontMetricsF, entry: LegendEntry, left: float, top: float
    ) -> None:
        colours = theme.palette()
        pen = QPen(entry.pen)  # a copy: the swatch has a width of its own
        pen.setWidthF(2)
        painter.setPen(QPen(colours.outline, 2) if entry.hidden else pen)
        middle = top + self._line / 2
        painter.drawLine(QPointF(left, middle), QPointF(left + _SWATCH, middle))
        label_width = self._label_width(metrics, entry) - _SWATCH - _GAP
        start = left + _SWATCH + _GAP
        align = Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft
        # The extra fractions of a pixel: widths are rounded, and a text as wide as its box would be elided or clipped.
        label = metrics.elidedText(entry.label, Qt.TextElideMode.ElideMiddle, label_width + 0.5)
        font = QFont(self._font)
        font.setStrikeOut(entry.hidden)
        painter.setFont(font)
        painter.setPen(colours.muted)
        painter.drawText(QRectF(start, top, label_width + 1, self._line), align, label)
        painter.setFont(self._font)
        value_width = metrics.horizontalAdvance(entry.value) + 2
        painter.setPen(colours.muted if entry.hidden else colours.text)
        painter.drawText(QRectF(start + label_width + _GAP, top, value_width, self._line), align, entry.value)
