"""Keys as this platform has and writes them: ⌘G and ⌘⌫ on macOS, Ctrl+G and Delete elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from html import escape
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QCursor, QFont, QKeySequence
from PySide6.QtWidgets import QLabel, QMenu, QPushButton, QVBoxLayout, QWidget

from app import theme

REMOVE_KEYS = "Ctrl+Backspace" if sys.platform == "darwin" else "Delete"
"""Removes what is selected. A Mac's keyboard has no Delete key: the one labelled so is Backspace, and the Finder's keys are ⌘⌫."""
_KEYS = re.compile(r"\b(?:(?:Ctrl|Alt|Shift|Meta)\+)+[^\s),;]+")


def key_name(keys: QKeySequence) -> str:
    """What the platform's menus call these keys."""
    return keys.toString(QKeySequence.SequenceFormat.NativeText)


def with_key_names(text: str) -> str:
    """The text, in which keys are portable (“Shows the next one (Ctrl+G)”), with the platform's names for them."""
    return _KEYS.sub(lambda found: key_name(QKeySequence(found[0])), text)


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


class EmptyState(QWidget):
    """A title, a sentence and a button in the middle of the page.

    Signals:
        button_clicked – the button was pressed.
    """

    button_clicked = Signal()

    def __init__(self, title: str, sentence: str, button_text: str) -> None:
        super().__init__()
        centre = Qt.AlignmentFlag.AlignCenter
        column = QVBoxLayout(self)
        column.setSpacing(theme.SPACE * 2)
        column.addStretch(2)
        column.addWidget(label(title, theme.title_font(), align=centre))
        column.addWidget(label(sentence, role="muted", align=centre, wrap=True))
        column.addWidget(button(button_text, self.button_clicked.emit, primary=True), 0, centre)
        column.addStretch(3)


PROPERTY = "guide"


def explain_at(widget: QWidget, place: str) -> None:
    """Say that the guide explains this widget there."""
    widget.setProperty(PROPERTY, place)


def place_about(widget: QWidget | None) -> str:
    """The place about the widget, or about the nearest one that it is in; "" where there is none."""
    while widget is not None:
        if place := widget.property(PROPERTY):
            return str(place)
        widget = widget.parentWidget()
    return ""
