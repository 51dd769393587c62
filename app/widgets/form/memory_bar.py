"""The memory bar: the estimated memory of a run by part, against what this machine has.

It estimates nothing: it draws a `MemoryParts`, with the sentences that come with it.
"""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QGridLayout, QSizePolicy, QVBoxLayout, QWidget

from app import theme
from app.model.memory_parts import MemoryParts, amount
from app.widgets.basic.labels_and_buttons import label
from app.widgets.basic.layout import clear_layout, set_style_property

BAR_HEIGHT = 14
LISTED_MIN_SHARE = 0.01
"""Parts below this share of the total are summed up as “Other”."""
ROW_MIN_BYTES = 0.5e6
"""Below this there is no row, neither for a part nor for “Other”: it would say 0 MB."""


class MemoryBar(QWidget):
    """A bar, a row for each part, and a sentence. Hidden while there is no estimate.

    Attributes:
        memory_parts – the estimate shown, or None.
        sentence – label: whether it fits.
        advice – label: what to change if it may not, or what would make it faster if it does.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.memory_parts: MemoryParts | None = None
        self._bar = _StackedBar()
        self.sentence, self.advice = label(wrap=True), label(wrap=True, role="muted")
        self._rows = QGridLayout()
        self._rows.setContentsMargins(0, 0, 0, 0)
        self._rows.setHorizontalSpacing(theme.SPACE)
        self._rows.setVerticalSpacing(2)
        self._rows.setColumnStretch(1, 1)
        title = label("Memory", theme.heading_font())
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        for part in (title, self._bar):
            column.addWidget(part)
        column.addLayout(self._rows)
        for part in (self.sentence, self.advice):
            column.addWidget(part)
        self.setAccessibleName("Memory")
        theme.signals.changed.connect(self._update_role)
        self.hide()

    def show_memory(self, memory_parts: MemoryParts | None) -> None:
        """Show the estimate; None hides the bar."""
        if memory_parts == self.memory_parts:
            return  # every edit of the form leads here, and most leave the estimate as it is
        self.memory_parts = memory_parts
        self.setVisible(memory_parts is not None)
        clear_layout(self._rows)
        if memory_parts is None:
            return
        parts = _listed_parts(memory_parts)
        for row, (name, size, about) in enumerate(parts):
            self._add_row(row, name, size, about)
        self.sentence.setText(memory_parts.sentence)
        advice = memory_parts.row_tip if memory_parts.verdict == "fits" else memory_parts.advice
        self.advice.setText(advice)
        self.advice.setVisible(bool(advice))
        self._bar.show_parts([size for _, size, _ in parts], memory_parts.limit)
        listed = ", ".join(f"{name} {amount(size)}" for name, size, _ in parts)
        self.setAccessibleDescription(
            f"{memory_parts.sentence} {listed}."
        )  # a screen reader cannot read the painted bar
        self._update_role()

    def _add_row(self, row: int, name: str, size: float, about: str) -> None:
        swatch = _Swatch(row)
        figure = label(amount(size), theme.figures_font(), align=Qt.AlignmentFlag.AlignRight)
        for column, widget in enumerate((swatch, label(name, role="muted"), figure)):
            widget.setToolTip(f"<p>{about}</p>" if about else "")
            self._rows.addWidget(widget, row, column)

    def _update_role(self) -> None:
        """Show the sentence in the colour of problems where the run may not fit."""
        tight = self.memory_parts is not None and self.memory_parts.verdict != "fits"
        set_style_property(self.sentence, "role", "problem" if tight else "muted")
        self.update()


class _StackedBar(QWidget):
    """The parts side by side. Its width stands for the machine's memory, or for the run's where that is more."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: list[float] = []
        self._limit = 0.0
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def sizeHint(self) -> QSize:
        return QSize(120, BAR_HEIGHT)

    def show_parts(self, sizes: list[float], limit: float) -> None:
        """Show parts of these sizes against the machine's memory `limit`; both in bytes."""
        self._sizes, self._limit = sizes, limit
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        full_width_bytes = max(sum(self._sizes), self._limit)
        if full_width_bytes <= 0:
            return
        colours, painter = theme.palette(), QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colours.hover)
        painter.drawRoundedRect(QRectF(self.rect()), 4, 4)
        left = 0.0
        for index, size in enumerate(self._sizes):
            width = self.width() * size / full_width_bytes
            # One pixel of gap between neighbours, yet never nothing: a listed part must be visible.
            painter.fillRect(QRectF(left, 0, max(width - 1, 1), self.height()), part_colour(index))
            left += width
        if self._limit < full_width_bytes:
            # A line where the machine's memory ends, edged in the background's colour to show on any part.
            x = self.width() * self._limit / full_width_bytes
            painter.fillRect(QRectF(x - 2, 0, 4, self.height()), colours.window)
            painter.fillRect(QRectF(x - 1, 0, 2, self.height()), colours.text)


class _Swatch(QWidget):
    """A square in a part's colour. It is painted, not styled, so a change of theme needs no new style sheet."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index
        self.setFixedSize(theme.scaled_size(QSize(10, 10)))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(part_colour(self._index))
        painter.drawRoundedRect(self.rect(), 3, 3)


def part_colour(index: int) -> QColor:
    """The colour of the part at `index`: the palette's hues in turn, from the seventh part on once more, half transparent."""
    colours = theme.palette()
    hues = (colours.accent, colours.length, colours.kl, colours.clip, colours.good, colours.warning)
    colour = QColor(hues[index % len(hues)])  # a copy: setAlphaF would change the palette's own
    colour.setAlphaF(1.0 if index < len(hues) else 0.5)
    return colour


def _listed_parts(memory_parts: MemoryParts) -> list[tuple[str, float, str]]:
    """(name, bytes, tool tip) of each row: the parts in their order, then the sum of the small ones, named in its tip."""
    min_bytes = max(memory_parts.total * LISTED_MIN_SHARE, ROW_MIN_BYTES)
    rows = [(part.name, part.bytes, part.about) for part in memory_parts.parts if part.bytes >= min_bytes]
    rest = [part for part in memory_parts.parts if 0 < part.bytes < min_bytes]
    if sum(part.bytes for part in rest) >= ROW_MIN_BYTES:
        names = ", ".join(f"{part.name} {amount(part.bytes)}" for part in rest)
        rows.append(("Other", sum(part.bytes for part in rest), names))
    return rows
