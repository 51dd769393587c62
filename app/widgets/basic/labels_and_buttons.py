"""Factories for labels and buttons with our fonts and style sheet roles."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QCursor, QFont
from PySide6.QtWidgets import QLabel, QMenu, QPushButton

from app.widgets.basic.key_names import with_key_names


class PlainLabel(QLabel):
    """A label whose text is never taken for HTML. Names, titles, sentences and texts may come from somebody else's run, model or rows, and
    rich text could show pictures from this disk, hide what it says, or pass for a part of the window."""

    def __init__(self, *arguments: Any, **properties: Any) -> None:
        super().__init__(*arguments, **properties)
        self.setTextFormat(Qt.TextFormat.PlainText)


def plain_tip(text: str) -> str:
    """A tool tip that shows this text as it is: Qt takes one with a tag in it for HTML."""
    return f"<p>{escape(text)}</p>".replace("\n", "<br>") if "<" in text else text


def label(
    text: str = "",
    font: QFont | None = None,
    role: str = "",
    *,
    wrap: bool = False,
    align: Qt.AlignmentFlag | None = None,
    selectable: bool = False,
) -> QLabel:
    """A plain-text label; `role` is one of the style sheet's (muted, caption, problem)."""
    widget = PlainLabel(text)
    widget.setWordWrap(wrap)
    if font is not None:
        widget.setFont(font)
    if role:
        widget.setProperty("role", role)
    if align is not None:
        widget.setAlignment(align)
    if selectable:
        widget.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return widget


def button(text: str, on_click: Callable[[], object], *, primary: bool = False, tip: str = "") -> QPushButton:
    """A button that calls `on_click()`; `primary` is the one that stands out on its page; keys in `tip` are portable (“Ctrl+G”)."""
    widget = QPushButton(text)
    widget.setToolTip(with_key_names(tip))
    if primary:
        widget.setProperty("role", "primary")
    widget.clicked.connect(lambda _checked=False: on_click())
    return widget


def give_menu(button: QPushButton, menu: QMenu) -> None:
    """Have a button open a menu.

    While a menu is open it has the mouse, so Qt never tells the button that the pointer has left it: it stayed in its hover colour
    until the pointer came back.
    """
    button.setMenu(menu)
    button.setProperty("menu", True)

    def follow_pointer() -> None:
        is_under = button.rect().contains(button.mapFromGlobal(QCursor.pos()))
        button.setAttribute(Qt.WidgetAttribute.WA_UnderMouse, is_under)
        button.update()

    menu.aboutToHide.connect(follow_pointer)
