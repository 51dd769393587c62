"""The ring around what has the keyboard's focus, for widgets that we paint: shown to who uses the keyboard, and not after a click."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import QWidget

from app import theme

BY_KEYBOARD = (Qt.FocusReason.TabFocusReason, Qt.FocusReason.BacktabFocusReason, Qt.FocusReason.ShortcutFocusReason)
WIDTH = 2
"""Of its line, in pixels."""


def paint_ring(widget: QWidget, radius: float) -> None:
    """Paint the ring along the edge of `widget`, in its `paintEvent`."""
    painter = QPainter(widget)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(QPen(theme.palette().accent, WIDTH))
    painter.drawRoundedRect(QRectF(widget.rect()).adjusted(1, 1, -1, -1), radius, radius)
