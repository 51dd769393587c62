"""Read-only text as high as its content, and the box that a prompt is typed in."""

from __future__ import annotations

from PySide6.QtCore import QSizeF, Qt, Signal
from PySide6.QtGui import QFont, QKeyEvent, QTextCursor, QTextOption
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QTextEdit, QWidget

FEWEST_LINES, MOST_LINES = 3, 8
"""Height of the prompt box: it grows with its text between these."""
_MARGINS = 18
"""What the frame of a text edit takes in height, in pixels."""


class GrowingText(QTextEdit):
    """Selectable plain text without a frame, as high as what it holds. Text is appended without setting the rest again, so a long answer
    that is being written costs no more than a short one, and a selection stays."""

    def __init__(self, name: str, font: QFont, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(name)
        self.setProperty("role", "plain")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setReadOnly(True)
        self.setTabChangesFocus(True)
        self.setFont(font)
        self.setAcceptRichText(False)
        self.setWordWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self._fit)
        self._fit(self.document().size())

    def show_text(self, text: str) -> None:
        """Show `text`; where it begins with what is shown, only the rest is appended."""
        shown = self.toPlainText()
        if text == shown:
            return
        if shown and text.startswith(shown):
            cursor = QTextCursor(self.document())
            cursor.movePosition(QTextCursor.MoveOperation.End)
            cursor.insertText(text[len(shown) :])
        else:
            self.setPlainText(text)

    def _fit(self, size: QSizeF) -> None:
        self.setFixedHeight(max(self.fontMetrics().lineSpacing(), round(size.height())) + 1)


class PromptBox(QPlainTextEdit):
    """Enter sends, Shift+Enter begins a line, Escape stops.

    Signals:
        sent – Enter was pressed.
        stopped – Escape was pressed.
    """

    sent = Signal()
    stopped = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTabChangesFocus(True)
        self.setAccessibleName("Prompt")
        self.textChanged.connect(self._fit)
        self._fit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        is_enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if is_enter and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self.sent.emit()
        elif event.key() == Qt.Key.Key_Escape:
            self.stopped.emit()
        else:
            super().keyPressEvent(event)

    def _fit(self) -> None:
        # A plain text edit's document counts its height in lines, wrapped ones included.
        lines = min(MOST_LINES, max(FEWEST_LINES, round(self.document().size().height())))
        self.setFixedHeight(lines * self.fontMetrics().lineSpacing() + _MARGINS)
