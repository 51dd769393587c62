"""What stands in place of a conversation: what is missing or going on, a sentence, and a button for what to do next."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.layout import set_shown

_WIDTH = 520


class Notice(QWidget):
    """Signals:
    button_clicked – the button was pressed.
    """

    button_clicked = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        centre = Qt.AlignmentFlag.AlignCenter
        self.title = label(font=theme.title_font(), align=centre, wrap=True)
        self.sentence = label(role="muted", align=centre, wrap=True, selectable=True)
        self.bar = QProgressBar(textVisible=False, minimum=0, maximum=0)
        self.bar.setFixedWidth(theme.scaled(240))
        self.bar.setAccessibleName("Loading")
        self.button = button("", self.button_clicked.emit, primary=True)
        # A widget of its own and no alignment: an aligned label does not get the height that its wrapped lines need.
        middle = QWidget()
        middle.setFixedWidth(theme.scaled(_WIDTH))
        column = QVBoxLayout(middle)
        column.setSpacing(2 * theme.SPACE)
        column.addStretch(2)
        column.addWidget(self.title)
        column.addWidget(self.sentence)
        for part in (self.bar, self.button):
            column.addWidget(part, 0, Qt.AlignmentFlag.AlignHCenter)
        column.addStretch(3)
        across = QHBoxLayout(self)
        across.addWidget(middle)

    def show_notice(self, title: str, sentence: str, button_text: str = "", *, busy: bool = False) -> None:
        """`busy` shows a bar that moves; without `button_text` there is no button."""
        self.title.setText(title)
        self.sentence.setText(sentence)
        self.button.setText(button_text)
        set_shown(self.bar, busy)
        set_shown(self.button, bool(button_text))
