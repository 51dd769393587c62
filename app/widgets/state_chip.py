"""A run's state as a dot and a word; and the words and colours themselves, for tables."""

from __future__ import annotations

from PySide6.QtWidgets import QHBoxLayout, QLabel, QWidget

from app.widgets.strip import WORDS, Dot

ROLES = {
    "starting": "warning",
    "running": "good",
    "paused": "warning",
    "stopping": "warning",
    "finished": "good",
    "stopped": "muted",
    "failed": "bad",
    "crashed": "bad",
}
"""A run's state → the palette's role for it."""


class StateChip(QWidget):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._dot, self._word = Dot(), QLabel()
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(6)
        row.addWidget(self._dot)
        row.addWidget(self._word)

    def show_state(self, state: str) -> None:
        self._word.setText(WORDS.get(state, ""))
        self._dot.set_role(ROLES.get(state, "faint"))
        self.setVisible(bool(state))


def word_of(state: str) -> str:
    return WORDS.get(state, state)
