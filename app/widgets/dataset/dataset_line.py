"""A one-line summary of the dataset under the Data field: rows, use of columns, rows left out. A click opens its page."""

from __future__ import annotations

from typing import Any, Protocol

from PySide6.QtCore import QEvent, QObject, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QEnterEvent, QHideEvent, QPainter, QPaintEvent, QShowEvent
from PySide6.QtWidgets import QPushButton, QSizePolicy, QWidget

from app import theme

WAIT_MS = 400
"""How long it must be visible before it asks for the dataset, so that it does not while the window is still opening."""


class SummarisedDataset(Protocol):
    """What the line needs of a dataset; `app.model.dataset.Dataset` has it.

    Signals:
        changed, counted – the summary may be another one.
    """

    changed: Any
    counted: Any

    def in_a_line(self) -> tuple[str, bool]:
        """(the summary, whether something is wrong)."""
        ...

    def watch(self, watcher: QObject, /, *, whole: bool = ...) -> None:
        """Keep the dataset read while `watcher` shows it; `whole` counts all of its prompts."""
        ...

    def leave(self, watcher: QObject, /) -> None: ...


class DatasetLine(QPushButton):
    """A flat button with the summary of a dataset as its text.

    Signals:
        page_requested – it was clicked.
    """

    page_requested = Signal()

    def __init__(self, dataset: SummarisedDataset, parent: QWidget | None = None) -> None:
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
        """Show the present summary; it is empty while no dataset is chosen."""
        summary, self._is_wrong = self._dataset.in_a_line()
        self.setText(summary)
        self.setToolTip(summary)
        self.setAccessibleName(f"Dataset: {summary}")
        self.setEnabled(bool(summary))
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
        """Paint the text elided at its end, grey until hovered or focused: QPushButton does not elide."""
        painter, colours = QPainter(self), theme.palette()
        is_active = self.underMouse() or self.hasFocus()
        font = theme.caption_font()
        font.setUnderline(is_active)
        painter.setFont(font)
        painter.setPen(colours.warning if self._is_wrong else colours.accent if is_active else colours.muted)
        text = painter.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, self.width())
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, text)
