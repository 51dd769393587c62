"""Labels, buttons, tool tips and key names in our fonts and style sheet roles, and the empty state of a page."""

import re
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QCursor, QFont, QKeySequence, QShortcut
from PySide6.QtWidgets import QLabel, QMenu, QProgressBar, QPushButton, QWidget

from app import theme
from app.widgets.basic.layout import column, configure, holder, row, set_shown

REMOVE_KEYS = "Ctrl+Backspace" if sys.platform == "darwin" else "Delete"
_KEYS = re.compile(r"\b(?:(?:Ctrl|Alt|Shift|Meta)\+)+[^\s),;]+")


def key_name(keys: QKeySequence) -> str:
    return keys.toString(QKeySequence.SequenceFormat.NativeText)


def on_remove(widget: QWidget, remove: Callable[[], object]) -> None:
    """Call `remove` at Delete and Backspace in a widget or a part of it."""
    for key in (Qt.Key.Key_Delete, Qt.Key.Key_Backspace):
        QShortcut(key, widget, context=Qt.ShortcutContext.WidgetWithChildrenShortcut).activated.connect(remove)


def with_key_names(text: str) -> str:
    """Replace portable keys in a text (“Ctrl+G”) by the platform's names (⌘G)."""
    return _KEYS.sub(lambda found: key_name(QKeySequence(found[0])), text)


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
    parent: QWidget | None = None,
    **settings: Any,
) -> QLabel:
    """A plain-text label; `role` is one of the style sheet's (muted, caption, problem). `settings`: `configure`."""
    # It never renders HTML: names and texts may come from another person's run, model or dataset.
    widget = QLabel(text, parent, wordWrap=wrap, textFormat=Qt.TextFormat.PlainText)
    if font is not None:
        widget.setFont(font)
    if align is not None:
        widget.setAlignment(align)
    if selectable:
        widget.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return configure(widget, role=role, **settings)


def show_text(label: QLabel | QPushButton, text: str) -> None:
    label.setText(text)
    label.setVisible(bool(text))


def from_home(path: str) -> str:
    """A path as people write it: in their home folder it begins with ~."""
    home = f"{Path.home()}/"
    return f"~/{path.removeprefix(home)}" if path.startswith(home) else path


def button(
    text: str,
    on_click: Callable[[], object] | None = None,
    *,
    primary: bool = False,
    tip: str = "",
    role: str = "",
    menu: QMenu | None = None,
    **settings: Any,
) -> QPushButton:
    """Keys in `tip` are portable (“Ctrl+G”). Return in a field of its dialog presses a `primary` button."""
    widget = QPushButton(text)
    if on_click is not None:
        widget.clicked.connect(lambda _checked=False: on_click())
    if menu is not None:
        widget.setMenu(menu)
        widget.setProperty("menu", True)

        def follow_pointer() -> None:
            is_under = widget.rect().contains(widget.mapFromGlobal(QCursor.pos()))
            widget.setAttribute(Qt.WidgetAttribute.WA_UnderMouse, is_under)
            widget.update()

        menu.aboutToHide.connect(follow_pointer)
    settings = {"default": primary} | settings
    return configure(widget, tip=with_key_names(tip), role="primary" if primary else role, **settings)


def progress_bar(name: str, steps: int = 1000, **settings: Any) -> QProgressBar:
    """A bar without text from 0 to `steps`; with 0 steps it only moves."""
    return configure(QProgressBar(textVisible=False, minimum=0, maximum=steps), name=name, **settings)


class EmptyState(QWidget):
    """A title, a sentence, a bar while something is loading, and buttons in the middle of an empty page."""

    button_clicked = Signal()

    def __init__(
        self,
        title: str = "",
        sentence: str = "",
        button_text: str = "",
        font: QFont | None = None,
        *more: QPushButton,
        **settings: Any,
    ) -> None:
        """`font` is the title's; `more` are further buttons."""
        super().__init__()
        configure(self, **settings)
        centre = Qt.AlignmentFlag.AlignCenter
        self.title = label(font=font or theme.title_font(), align=centre, wrap=True)
        self.sentence = label(role="muted", align=centre, wrap=True, selectable=True)
        self.bar = progress_bar("Loading", 0, width=240)
        self.button = button("", self.button_clicked.emit, primary=True)
        # A widget of fixed width: an aligned label does not get the height that its wrapped lines need.
        buttons = row(None, self.button, *more, None)
        parts = ((None, 2), self.title, self.sentence, (self.bar, 0, centre), buttons, (None, 3))
        content = column(*parts, spacing=2 * theme.SPACE, margins=theme.SPACE)
        row(holder(content, maximumWidth=theme.scaled(520)), into=self)
        self.show_notice(title, sentence, button_text)

    def show_notice(self, title: str, sentence: str, button_text: str = "", *, busy: bool = False) -> None:
        """`busy` shows a bar that moves; without `button_text` there is no button."""
        self.title.setText(title)
        self.sentence.setText(sentence)
        set_shown(self.bar, busy)
        self.button.setText(button_text)
        set_shown(self.button, bool(button_text))


def place_about(widget: QWidget | None) -> str:
    """The place of the guide that F1 opens: the property `guide` of the widget or its nearest ancestor, or ""."""
    while widget is not None:
        if place := widget.property("guide"):
            return str(place)
        widget = widget.parentWidget()
    return ""
