"""Prompts of the run's held-out split: the one before, the one after, any; and the answer that is expected."""

from __future__ import annotations

import random

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.labels_and_buttons import button, label, plain_tip
from app.widgets.basic.number_format import figure


class RowStrip(QWidget):
    """Attributes:
    expected – the line with the expected answer.

    Signals:
        row_requested(int) – show this row, from 0; −1 is the last.
    """

    row_requested = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._row, self._of = -1, 0
        self.previous = button(
            "Previous", lambda: self.row_requested.emit(max(-1, self._row - 1)), tip="The row before"
        )
        self.next = button("Next", lambda: self.row_requested.emit(self._row + 1), tip="The row after")
        self.random = button("Random", self._request_any, tip="Any row")
        self.about = ElidedLabel()
        self.about.setFont(theme.figures_font())
        self.expected = QLineEdit()
        self.expected.setPlaceholderText("none known")
        self.expected.setAccessibleName("Expected answer")
        self.expected.setToolTip(
            "Given to the reward functions; without it those that compare with an answer are left out."
        )
        self.expected.setFixedWidth(theme.scaled(150))
        caption = label("Expected answer", role="muted")
        caption.setBuddy(self.expected)
        self._rows = QWidget()
        rows = QHBoxLayout(self._rows)
        rows.setContentsMargins(0, 0, 0, 0)
        rows.setSpacing(theme.SPACE)
        for part in (label("Prompts of the dataset", role="muted"), self.previous, self.next, self.random):
            rows.addWidget(part)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(theme.SPACE)
        row.addWidget(self._rows)
        row.addWidget(self.about, 1)
        row.addWidget(caption)
        row.addWidget(self.expected)

    def show_row(self, number: int, of: int, answer: str, source: str) -> None:
        self._row, self._of = number, of
        self.about.setText(f"Row {figure(number + 1)} of {figure(of)}")
        self.about.setToolTip(plain_tip(source))
        self.expected.setText(answer)

    def forget(self, *, has_rows: bool) -> None:
        """Show no row; without `has_rows` there are none to choose from, as with a model that is no run."""
        self._row, self._of = -1, 0
        self.about.setText("")
        self.expected.clear()
        self._rows.setVisible(has_rows)
        self.setEnabled(True)

    def _request_any(self) -> None:
        # Before the first row its number of rows is not known; a large number is taken modulo it.
        self.row_requested.emit(random.randrange(self._of or 1 << 30))
