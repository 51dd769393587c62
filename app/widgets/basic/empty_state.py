"""The empty state of a page: what is missing, what to do about it, and a button that does it."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import button, label


class EmptyState(QWidget):
    """A title, a sentence and a button in the middle of the page.

    Signals:
        button_clicked – the button was pressed.
    """

    button_clicked = Signal()

    def __init__(self, title: str, sentence: str, button_text: str) -> None:
        super().__init__()
        centre = Qt.AlignmentFlag.AlignCenter
        column = QVBoxLayout(self)
        column.setSpacing(theme.SPACE * 2)
        column.addStretch(2)
        column.addWidget(label(title, theme.title_font(), align=centre))
        column.addWidget(label(sentence, role="muted", align=centre, wrap=True))
        column.addWidget(button(button_text, self.button_clicked.emit, primary=True), 0, centre)
        column.addStretch(3)
