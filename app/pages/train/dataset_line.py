"""The line under the Data field of the Train page: rows, mapped columns, prompts that are too long. A click opens Dataset."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QEnterEvent, QHideEvent, QPainter, QPaintEvent, QShowEvent
from PySide6.QtWidgets import QPushButton, QSizePolicy, QWidget

from app import theme
from app.state.dataset import Dataset
from app.widgets.basic.labels_and_buttons import plain_tip

WAIT_MS = 400
"""How long it must be visible before it asks for the dataset, so that it does not while the window is still opening."""


class DatasetLine(QPushButton):
    """Shows the dataset's summary in one line, and watches the dataset while it is visible.

    Signals:
        page_requested – it was clicked: show the Dataset page.
    """

    page_requested = Signal()

    def __init__(self, dataset: Dataset, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._dataset = dataset
        self.setFlat(True)
        self.setProperty("role", "link")
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self._delay = QTimer(self, singleShot=True, interval=WAIT_MS)
        self._delay.timeout.connect(lambda: dataset.watch(self, count_all=False))
        self.clicked.connect(lambda _checked=False: self.page_requested.emit())
        for signal in (dataset.changed, dataset.counts_changed):
            signal.connect(self.refresh)
        theme.signals.changed.connect(self.update)
        self.refresh()

    def refresh(self) -> None:
        """Show the present summary; it is empty while no dataset is chosen."""
        summary, self._is_wrong = self._dataset.summary_line()
        self.setText(summary)
        self.setToolTip(plain_tip(summary))
        self.setAccessibleName(f"Dataset: {summary}")
        self.setEnabled(bool(summary))
        self.update()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._delay.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._delay.stop()
        self._dataset.unwatch(self)

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
