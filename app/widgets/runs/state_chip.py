"""A run's state as a coloured dot and a label; and the tables of labels and colours, for the status strip and tables."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import PlainLabel

STATE_LABELS = {
    "": "No run",
    "queued": "Queued",
    "starting": "Starting",
    "running": "Running",
    "paused": "Paused",
    "stopping": "Stopping",
    "finished": "Finished",
    "stopped": "Stopped",
    "failed": "Failed",
    "crashed": "Crashed",
}
"""A run's state → its label."""

STATE_ROLES = {
    "": "placeholder",
    "queued": "muted",
    "starting": "warning",
    "running": "good",
    "paused": "warning",
    "stopping": "warning",
    "finished": "good",
    "stopped": "muted",
    "failed": "bad",
    "crashed": "bad",
}
"""A run's state → its role in the palette."""


class StateDot(QWidget):
    """A run's state as a colour; it needs no accessible name, as the label beside it says the same."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._state = ""
        self.setFixedSize(theme.scaled_size(QSize(10, 10)))

    def show_state(self, state: str) -> None:
        self._state = state
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(getattr(theme.palette(), STATE_ROLES[self._state]))
        painter.drawEllipse(QRectF(self.rect()).adjusted(1, 1, -1, -1))


class StateChip(QWidget):
    """A run's state as a dot and a label."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._dot, self._label = StateDot(), PlainLabel()
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(6)
        row.addWidget(self._dot)
        row.addWidget(self._label)

    def show_state(self, state: str) -> None:
        self._label.setText(STATE_LABELS[state])
        self._dot.show_state(state)
