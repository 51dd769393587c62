"""One quiet line under the Data field: how many rows, which column is what, what will be left out. A click leads on."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QEvent, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QEnterEvent, QHideEvent, QPainter, QPaintEvent, QShowEvent
from PySide6.QtWidgets import QPushButton, QSizePolicy, QWidget

from app import theme

WAIT_MS = 400
"""How long it must be seen before it asks: not while the window is still opening."""


class DatasetLine(QPushButton):
    """Shows what `dataset` (an `app.model.dataset.Dataset`) says of itself in a line.

    Signals: wanted – it was pressed: show the page.
    """

    page_requested = Signal()

    def __init__(self, dataset: Any, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._dataset = dataset
        self.setFlat(True)
        self.setProperty("role", "link")
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self._soon = QTimer(self, singleShot=True, interval=WAIT_MS)
        self._soon.timeout.connect(lambda: dataset.watch(self, whole=False))
        self.clicked.connect(lambda _checked=False: self.page_requested.emit())
        for signal in (dataset.changed, dataset.counted):
            signal.connect(self.refresh)
        theme.signals.changed.connect(self.update)
        self.refresh()

    def refresh(self) -> None:
        """Say what is known now; nothing where no dataset is chosen."""
        words, self._wrong = self._dataset.in_a_line()
        self.setText(words)
        self.setToolTip(words)
        self.setAccessibleName(f"Dataset: {words}")
        self.setEnabled(bool(words))
        self.update()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._soon.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._soon.stop()
        self._dataset.leave(self)

    def enterEvent(self, event: QEnterEvent) -> None:
        super().enterEvent(event)
        self.update()

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(120, self.fontMetrics().lineSpacing() + 4)

    minimumSizeHint = sizeHint

    def paintEvent(self, event: QPaintEvent) -> None:
        """One line that gives way at its end; grey until the pointer or the cursor is on it."""
        painter, colours = QPainter(self), theme.palette()
        here = self.underMouse() or self.hasFocus()
        font = theme.caption_font()
        font.setUnderline(here)
        painter.setFont(font)
        painter.setPen(colours.warning if self._wrong else colours.accent if here else colours.muted)
        text = painter.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, self.width())
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, text)
