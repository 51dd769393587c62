"""A line that says what was just done, with a button that undoes it."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QWidget

from app.widgets.basic.labels_and_buttons import button, label


class UndoBar(QFrame):
    """Hidden until `show_done`.

    Signals:
        undone – Undo was pressed.
    """

    undone = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "banner")
        self.sentence = label(wrap=True)
        self.undo = button("Undo", self._undo)
        self.dismiss = button("Dismiss", self.hide)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 6, 8, 6)
        row.addWidget(self.sentence, 1)
        row.addWidget(self.undo)
        row.addWidget(self.dismiss)
        self.hide()

    def show_done(self, sentence: str, *, can_undo: bool) -> None:
        self.sentence.setText(sentence)
        self.undo.setVisible(can_undo)
        self.show()

    def _undo(self) -> None:
        self.hide()
        self.undone.emit()
