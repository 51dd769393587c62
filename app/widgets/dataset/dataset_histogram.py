"""A histogram of prompt lengths in tokens, with a line at the longest prompt that leaves space for a completion."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PySide6.QtCore import QEvent, QRectF, QSize, Qt
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app import theme
from app.widgets.basic.number_format import ticks

BAR_PITCH = 7
"""Pixels from one bar to the next."""


class Histogram(QWidget):
    """Shows pairs (tokens, rows), ascending in tokens, which it adds up into bins."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._lengths: Sequence[tuple[int, int]] = ()
        self._prompt_limit, self._placeholder = 0, ""
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName("Lengths of the prompts")
        theme.signals.changed.connect(self.update)

    def show_lengths(self, lengths: Sequence[tuple[int, int]], prompt_limit: int, placeholder: str = "") -> None:
        """`prompt_limit`: most tokens of a prompt; `placeholder`: the text while there are no lengths."""
        self._lengths, self._prompt_limit, self._placeholder = lengths, prompt_limit, placeholder
        longest = lengths[-1][0] if lengths else 0
        self.setAccessibleDescription(
            f"From {lengths[0][0]} to {longest} tokens; {prompt_limit} fit." if lengths else placeholder
        )
        self.update()

    def sizeHint(self) -> QSize:
        return theme.scaled_size(QSize(200, 88))

    def minimumSizeHint(self) -> QSize:
        return theme.scaled_size(QSize(120, 64))

    @property
    def _line(self) -> int:
        """Height of the line of labels below the bars, and of the one above them."""
        return theme.scaled(16)

    # Bins

    def bins(self) -> list[tuple[int, int]]:
        """(shortest length, rows) of each bar."""
        step, count = self._binning()
        rows = [0] * count
        for tokens, number in self._lengths:
            rows[min(count - 1, tokens // step)] += number
        return [(i * step, number) for i, number in enumerate(rows)]

    def _binning(self) -> tuple[int, int]:
        """(tokens per bar, number of bars), up to the longest prompt, or up to the limit if that is less than twice as far."""
        longest = self._lengths[-1][0] if self._lengths else 1
        reach = max(longest, self._prompt_limit if self._prompt_limit < 2 * longest else 0) + 1
        step = max(1, math.ceil(reach / max(8, self.width() // BAR_PITCH)))
        return step, math.ceil(reach / step)

    # Drawing

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, colours = QPainter(self), theme.palette()
        floor = self.height() - self._line
        if not self._lengths:
            painter.setPen(colours.muted)
            flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
            painter.drawText(self.rect().adjusted(8, 0, -8, 0), flags, self._placeholder)
            return
        painter.fillRect(QRectF(0, floor, self.width(), 1), colours.hairline)
        bins = self.bins()
        highest, width = max(rows for _, rows in bins), self.width() / len(bins)
        for i, (first, rows) in enumerate(bins):
            if rows:  # at least two pixels: a single long prompt among thousands must be visible
                height = max(2.0, (floor - self._line) * rows / highest)
                colour = colours.warning if first > self._prompt_limit else colours.length
                painter.fillRect(QRectF(i * width, floor - height, max(1.0, width - 1), height), colour)
        self._draw_axis(painter, floor, len(bins) * self._binning()[0])

    def _draw_axis(self, painter: QPainter, floor: int, reach: int) -> None:
        colours = theme.palette()
        painter.setFont(theme.figures_font(theme.CAPTION))
        painter.setPen(colours.muted)
        left, right = ticks([0, reach])
        below = QRectF(0, floor + 1, self.width(), self._line)
        painter.drawText(below, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, left)
        painter.drawText(below, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, f"{right} tokens")
        if 0 < self._prompt_limit < reach:
            self._draw_limit(painter, floor, self.width() * self._prompt_limit / reach)

    def _draw_limit(self, painter: QPainter, floor: int, x: float) -> None:
        """Draw the limit as a dashed line, and its label on the side with more space."""
        painter.setPen(QPen(theme.palette().text, 1, Qt.PenStyle.DashLine))
        painter.drawLine(int(x), 0, int(x), floor)
        side = Qt.AlignmentFlag.AlignRight if x > self.width() / 2 else Qt.AlignmentFlag.AlignLeft
        beside = (
            QRectF(0, 0, x - 5, self._line)
            if x > self.width() / 2
            else QRectF(x + 5, 0, self.width() - x - 5, self._line)
        )
        painter.setPen(theme.palette().text)
        painter.drawText(beside, side | Qt.AlignmentFlag.AlignTop, f"{self._prompt_limit:,} fit")

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and self._lengths and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), self.tool_tip_at(event.pos().x()), self)
            return True
        return super().event(event)

    def tool_tip_at(self, x: int) -> str:
        """“120 to 127 tokens: 31 rows”, for the bar at `x` in pixels."""
        bins, step = self.bins(), self._binning()[0]
        first, rows = bins[max(0, min(len(bins) - 1, x * len(bins) // max(1, self.width())))]
        span = f"{first:,}" if step == 1 else f"{first:,} to {first + step - 1:,}"
        return f"{span} tokens: {rows:,} {'row' if rows == 1 else 'rows'}"
