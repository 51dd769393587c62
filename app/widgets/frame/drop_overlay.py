"""What the window shows while a file is dragged over it: what dropping the file would do."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QWidget

from app import theme

MARGIN, RADIUS = 12, 12
VEIL_ALPHA = 235
"""How opaque the veil over the window is, of 255: the text on it must be readable."""


class DropOverlay(QWidget):
    """A veil over its parent with a dashed frame and a sentence, hidden until `show_sentence`. The pointer goes through it."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._covered = parent
        self._sentence = ""
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.hide()
        parent.installEventFilter(self)

    @property
    def sentence(self) -> str:
        """What is shown; "" while it is hidden."""
        return self._sentence if not self.isHidden() else ""

    def show_sentence(self, sentence: str) -> None:
        """Say what a drop would do; "" hides it."""
        self._sentence = sentence
        self.setGeometry(self._covered.rect())
        self.setVisible(bool(sentence))
        self.raise_()
        self.update()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Resize and not self.isHidden():
            self.setGeometry(self._covered.rect())
        return super().eventFilter(watched, event)

    def paintEvent(self, event: QPaintEvent) -> None:
        colours, painter = theme.palette(), QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        veil = QColor(colours.selection)
        veil.setAlpha(VEIL_ALPHA)
        painter.fillRect(self.rect(), veil)
        pen = QPen(colours.accent, 2, Qt.PenStyle.DashLine)
        painter.setPen(pen)
        inside = QRectF(self.rect()).adjusted(MARGIN, MARGIN, -MARGIN, -MARGIN)
        painter.drawRoundedRect(inside, RADIUS, RADIUS)
        painter.setPen(colours.text)
        painter.setFont(theme.title_font())
        flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
        painter.drawText(inside.adjusted(MARGIN, MARGIN, -MARGIN, -MARGIN), flags, self._sentence)
