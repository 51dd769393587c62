"""The memory bar: the estimated memory of a run by part, against what this machine has. It draws a MemoryParts as given."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QSizePolicy, QVBoxLayout, QWidget

from app import theme
from app.model.memory_parts import MemoryParts, amount
from app.widgets.basic.labels_and_buttons import label

BAR_HEIGHT = 14
OTHER_MIN_BYTES, LISTED_MIN_SHARE = 0.5e6, 0.01
"""Parts below this share of the whole are gathered under “Other”, unless all of them are fewer bytes than that: a row that
says 0 MB tells nobody anything."""


class MemoryBar(QWidget):
    """A bar, a row for each part, and a sentence. Hidden until there is something to show."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.memory_parts: MemoryParts | None = None
        self._bar = _Bar()
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
        theme.signals.changed.connect(self._colour)
        self.hide()

    def show_memory(self, memory_parts: MemoryParts | None) -> None:
        """Draw it; None hides the bar."""
        if memory_parts == self.memory_parts:
            return
        self.memory_parts = memory_parts
        self.setVisible(memory_parts is not None)
        self._clear()
        if memory_parts is None:
            return
        parts = _listed_parts(memory_parts)
        for row, (name, size, about) in enumerate(parts):
            self._add_row(row, name, size, about)
        self.sentence.setText(memory_parts.sentence)
        self.advice.setText(memory_parts.advice)
        self.advice.setVisible(bool(memory_parts.advice) and memory_parts.verdict != "fits")
        self._bar.show_parts([size for _, size, _ in parts], memory_parts.limit)
        told = ", ".join(f"{name} {amount(size)}" for name, size, _ in parts)
        self.setAccessibleDescription(f"{memory_parts.sentence} {told}.")
        self._colour()

    def _add_row(self, row: int, name: str, size: float, about: str) -> None:
        swatch = _Swatch(row)
        figure = label(amount(size), theme.figures_font(), align=Qt.AlignmentFlag.AlignRight)
        for place, widget in enumerate((swatch, label(name, role="muted"), figure)):
            widget.setToolTip(f"<p>{about}</p>" if about else "")
            self._rows.addWidget(widget, row, place)

    def _clear(self) -> None:
        while (item := self._rows.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.hide()
                widget.deleteLater()

    def _colour(self) -> None:
        """The sentence stands out where the run may not fit."""
        tight = self.memory_parts is not None and self.memory_parts.verdict != "fits"
        _set_role(self.sentence, "problem" if tight else "muted")
        self.update()


class _Bar(QWidget):
    """The parts side by side. The whole width is what this machine has, or the need where that is more."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: list[float] = []
        self._room = 0.0
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def sizeHint(self) -> QSize:
        return QSize(120, BAR_HEIGHT)

    def show_parts(self, sizes: list[float], room: float) -> None:
        self._sizes, self._room = sizes, room
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        whole = max(sum(self._sizes), self._room)
        if whole <= 0:
            return
        colours, painter = theme.palette(), QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colours.hover)
        painter.drawRoundedRect(QRectF(self.rect()), 4, 4)
        left = 0.0
        for place, size in enumerate(self._sizes):
            wide = self.width() * size / whole
            painter.fillRect(QRectF(left, 0, max(wide - 1, 1), self.height()), part_colour(place))
            left += wide
        if self._room < whole:  # where the machine's memory ends
            x = self.width() * self._room / whole
            painter.fillRect(QRectF(x - 2, 0, 4, self.height()), colours.window)
            painter.fillRect(QRectF(x - 1, 0, 2, self.height()), colours.text)


class _Swatch(QWidget):
    def __init__(self, place: int) -> None:
        super().__init__()
        self._place = place
        self.setFixedSize(theme.scaled_size(QSize(10, 10)))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(part_colour(self._place))
        painter.drawRoundedRect(self.rect(), 3, 3)


def part_colour(place: int) -> QColor:
    """A colour for the part at this place: the fixed hues of the palette in turn, then again, paler."""
    colours = theme.palette()
    hues = (colours.accent, colours.length, colours.kl, colours.clip, colours.good, colours.warning)
    colour = QColor(hues[place % len(hues)])
    colour.setAlphaF(1.0 if place < len(hues) else 0.5)
    return colour


def _listed_parts(memory_parts: MemoryParts) -> list[tuple[str, float, str]]:
    """(name, bytes, about) of the parts, in their order, the small ones together at the end."""
    least = memory_parts.total * LISTED_MIN_SHARE
    rows = [(part.name, part.bytes, part.about) for part in memory_parts.parts if part.bytes >= least]
    rest = [part for part in memory_parts.parts if 0 < part.bytes < least]
    if sum(part.bytes for part in rest) >= OTHER_MIN_BYTES:
        told = ", ".join(f"{part.name} {amount(part.bytes)}" for part in rest)
        rows.append(("Other", sum(part.bytes for part in rest), told))
    return rows


def _set_role(of: QLabel, role: str) -> None:
    if of.property("role") != role:
        of.setProperty("role", role)
        of.style().unpolish(of)
        of.style().polish(of)
