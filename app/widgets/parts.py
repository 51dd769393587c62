"""Labels and buttons as our pages want them, in one line each."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtGui import QFont
from PySide6.QtWidgets import QLabel, QPushButton


def label(
    text: str = "",
    font: QFont | None = None,
    role: str = "",
    *,
    wrap: bool = False,
    align: Qt.AlignmentFlag | None = None,
    selectable: bool = False,
) -> QLabel:
    """A label of plain text; `role` is one of the stylesheet's (muted, caption)."""
    made = QLabel(text)
    made.setTextFormat(Qt.TextFormat.PlainText)
    made.setWordWrap(wrap)
    if font is not None:
        made.setFont(font)
    if role:
        made.setProperty("role", role)
    if align is not None:
        made.setAlignment(align)
    if selectable:
        made.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return made


def button(text: str, do: Callable[[], object], *, primary: bool = False, tip: str = "") -> QPushButton:
    """A button that does one thing; the primary one is the obvious one of its page."""
    made = QPushButton(text)
    made.setToolTip(tip)
    if primary:
        made.setProperty("role", "primary")
    made.clicked.connect(lambda _checked=False: do())
    return made
