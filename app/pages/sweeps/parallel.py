"""Parallel coordinates: an axis for each setting that varies and one for the metric, a line for each run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import QEvent, QPointF, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QKeyEvent, QMouseEvent, QPaintEvent, QPen, QPolygonF
from PySide6.QtWidgets import QToolTip, QWidget

from app import theme
from app.widgets.basic.layout import configure, paint_ring
from app.widgets.basic.tables import LEFT, RIGHT
from backend.runs.sweep import text_of

LOG_FROM = 10  # an axis is logarithmic where its largest value is so many times the least
NEAR, TICKS = 10, 5
NOTHING = "No run has a value yet."


@dataclass(frozen=True, slots=True)
class ParallelLine:
    """A run: its name, a value for each axis, and a `key` for who chooses it."""

    key: str
    name: str
    values: tuple[Any, ...]


class Axis:
    """Places values from 0 to 1: numbers by size, anything else in its order. `ticks`: values with a label."""

    def __init__(self, title: str, values: Sequence[Any], *, is_metric: bool) -> None:
        self.title = title
        known = list(dict.fromkeys(values))
        self._is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
        self.ticks = sorted(known) if self._is_number else sorted(known, key=str)
        low, high = (self.ticks[0], self.ticks[-1]) if self._is_number else (0, 0)
        self._is_log = not is_metric and low > 0 and high / low >= LOG_FROM
        self._low, self._high = (math.log(low), math.log(high)) if self._is_log else (low, high)
        if is_metric and high > low:
            self.ticks = [low + (high - low) * i / (TICKS - 1) for i in range(TICKS)]

    def place(self, value: Any) -> float:
        if not self._is_number:
            return (self.ticks.index(value) + 0.5) / len(self.ticks)
        at = math.log(value) if self._is_log else value
        return (at - self._low) / (self._high - self._low) if self._high > self._low else 0.5


class ParallelPlot(QWidget):
    """Hover, or the arrow keys, names a run; a click or Enter chooses it. The best lines have the deepest colour."""

    chosen = Signal(str)

    def __init__(self, name: str) -> None:
        super().__init__()
        configure(self, name=name, minimumHeight=theme.scaled(200), mouseTracking=True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self._title, self._axes, self._lines = name, list[Axis](), list[ParallelLine]()
        self.current: ParallelLine | None = None

    def show_lines(self, titles: Sequence[str], lines: Sequence[ParallelLine], sign: int = 1) -> None:
        """Lines without a value for the last axis, the metric, are left out. `sign`: −1 where its lowest is best."""
        whole = sorted((line for line in lines if line.values[-1] is not None), key=lambda line: sign * line.values[-1])
        columns = list(zip(titles, zip(*(line.values for line in whole), strict=True), strict=False))
        self._axes = [Axis(*each, is_metric=each is columns[-1]) for each in columns]
        self._lines = whole
        self._point_at(next((line for line in whole if self.current and line.key == self.current.key), None))

    def describe(self, line: ParallelLine) -> str:
        pairs = zip(self._axes, map(text_of, line.values), strict=True)
        return f"{line.name}: " + ", ".join(f"{axis.title} {value}" for axis, value in pairs)

    def polygon(self, line: ParallelLine) -> QPolygonF:
        area = self._area()
        heights = [axis.place(value) * area.height() for axis, value in zip(self._axes, line.values, strict=True)]
        return QPolygonF([QPointF(self._x(i), area.bottom() - height) for i, height in enumerate(heights)])

    def _area(self) -> QRectF:
        side, head = theme.scaled(72), theme.scaled(34)
        return QRectF(self.rect()).adjusted(side, head, -side, -theme.scaled(16))

    def _x(self, i: int) -> float:
        area = self._area()
        return area.left() + area.width() * i / max(1, len(self._axes) - 1)

    def _point_at(self, line: ParallelLine | None) -> None:
        self.current = line
        about = self.describe(line) if line else "" if self._lines else NOTHING
        self.setAccessibleName(" · ".join(filter(None, (self._title, about))))
        self.update()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        at = event.position()
        near = min(self._lines, key=lambda line: _distance(self.polygon(line), at), default=None)
        is_near = near is not None and _distance(self.polygon(near), at) <= theme.scaled(NEAR)
        self._point_at(near if is_near else None)
        text = self.describe(self.current) if self.current is not None else ""
        QToolTip.showText(event.globalPosition().toPoint(), text, self)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if self.current is not None:
            self.chosen.emit(self.current.key)

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        self._point_at(None)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        moves = {Qt.Key.Key_Up: 1, Qt.Key.Key_Right: 1, Qt.Key.Key_Down: -1, Qt.Key.Key_Left: -1}
        move = moves.get(Qt.Key(event.key()))
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.current is not None:
            self.chosen.emit(self.current.key)
        elif move is None or not self._lines:
            super().keyPressEvent(event)
        else:
            place = self._lines.index(self.current) + move if self.current in self._lines else len(self._lines) - 1
            self._point_at(self._lines[max(0, min(len(self._lines) - 1, place))])

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, colours, area = theme.painter(self), theme.palette(), self._area()
        for line in self._lines:
            is_current = line is self.current
            place, worst = (self._axes[-1].place(each.values[-1]) for each in (line, self._lines[0]))
            colour = QColor(colours.accent)
            colour.setAlphaF(1.0 if is_current else (0.25 + 0.65 * abs(place - worst)) * (0.6 if self.current else 1))
            painter.setPen(QPen(colour, 3 if is_current else 1.6))
            painter.drawPolyline(self.polygon(line))
        centre, width, height = Qt.AlignmentFlag.AlignCenter, theme.scaled(66), theme.scaled(14)
        if not self._lines:
            painter.setPen(colours.muted)
            painter.drawText(self.rect(), centre, NOTHING)
        painter.setFont(theme.figures_font(theme.CAPTION))
        for i, axis in enumerate(self._axes):
            x = self._x(i)
            painter.setPen(QPen(colours.outline, 1))
            painter.drawLine(QPointF(x, area.top()), QPointF(x, area.bottom()))
            painter.setPen(colours.text)
            painter.drawText(QRectF(x - 100, 0, 200, area.top() - 8), centre, axis.title)
            painter.setPen(colours.muted)
            is_last, above = i == len(self._axes) - 1, math.inf
            for tick in axis.ticks:
                y = area.bottom() - axis.place(tick) * area.height()
                if above - y >= height:
                    box = QRectF(x + 6 if is_last else x - width - 6, y - height / 2, width, height)
                    painter.drawText(box, LEFT if is_last else RIGHT, text_of(tick))
                    above = y
        painter.end()
        if self.hasFocus():
            paint_ring(self, 8)


def _distance(line: QPolygonF, at: QPointF) -> float:
    for start, end in zip(line.toList(), line.toList()[1:], strict=False):
        if start.x() <= at.x() <= end.x():
            share = (at.x() - start.x()) / max(1e-9, end.x() - start.x())
            return abs(start.y() + share * (end.y() - start.y()) - at.y())
    return math.inf
