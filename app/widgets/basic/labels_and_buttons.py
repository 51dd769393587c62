"""Labels, buttons and edges as our pages want them, in one line each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QDesktopServices, QFont
from PySide6.QtWidgets import QAbstractScrollArea, QFrame, QLabel, QLayout, QPushButton, QVBoxLayout, QWidget

from app import theme


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


def in_card(view: QWidget) -> QFrame:
    """A table or a list in a card of its own."""
    card = QFrame()
    card.setProperty("role", "card")
    column = QVBoxLayout(card)
    column.setContentsMargins(4, 4, 4, 4)
    column.addWidget(view)
    return card


def show_if(wanted: bool, widget: QWidget) -> None:
    """Show or hide a widget that is not as wanted. What is shown once more, in a window that is not yet on the screen, is
    dressed and laid out at once, with all that stands in it, and again when the window appears."""
    if widget.isHidden() == wanted:
        widget.setVisible(wanted)


def keep_gutter(area: QAbstractScrollArea, inside: QLayout) -> None:
    """End what scrolls one gutter before the right edge of its area, whether or not a scroll bar stands in it: so it
    lines up with what stands above. To be called when the area is resized."""
    bar = area.width() - area.viewport().width()
    edges = inside.contentsMargins()
    inside.setContentsMargins(edges.left(), edges.top(), max(0, theme.GUTTER - bar), edges.bottom())


def show_file(path: Path) -> None:
    """Open a file or folder in whatever the desktop opens it with."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(path)))
