"""The reward file beside the scores: its text to edit, and what went wrong in it, line by line. It opens and writes
nothing: it says what a person wants.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QStackedLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.rewards.code_editor import CodeEditor


class RewardFilePanel(QFrame):
    """Signals: save_wanted; score_wanted; new_wanted; open_wanted; reload_wanted; left – the editor, by Escape."""

    save_requested = Signal()
    score_requested = Signal()
    new_requested = Signal()
    open_requested = Signal()
    reload_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.editor = CodeEditor()
        self.path = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self.save = button("Save and score", self.save_requested.emit, tip="Write the file and score again (Ctrl+S)")
        self.trouble = label(role="problem", wrap=True, selectable=True)
        self.reload = button("Reload", self.reload_requested.emit)
        self.frames = QLabel(wordWrap=True)
        self.frames.setFont(theme.mono_font(theme.CAPTION))
        self.frames.setTextFormat(Qt.TextFormat.RichText)
        self.frames.setTextInteractionFlags(
            Qt.TextInteractionFlag.LinksAccessibleByMouse | Qt.TextInteractionFlag.LinksAccessibleByKeyboard
        )
        self.frames.setAccessibleName("Where it went wrong")
        self.frames.linkActivated.connect(lambda line: self.editor.reveal(int(line)))
        self.editor.save_requested.connect(self.save_requested)
        self.editor.run_requested.connect(self.score_requested)
        self.editor.left.connect(lambda: self.save.setFocus(Qt.FocusReason.TabFocusReason))
        self.editor.document().modificationChanged.connect(lambda _: self._show_state())
        self._name = ""
        self._lay_out()
        self.show_file("", None)
        self.show_error(None)

    def show_file(self, name: str, text: str | None) -> None:
        """The file's path and text; None for no file."""
        self._name = name
        self._stack.setCurrentIndex(0 if text is None else 1)
        if text is not None:
            self.editor.show_text(text)
        self._show_state()

    def show_error(self, error: Mapping[str, Any] | None) -> None:
        """What went wrong: the sentence, and the person's own lines of the traceback."""
        self.editor.show_problem(error["line"] if error else 0, error["sentence"] if error else "")
        self.say(error["sentence"] if error else "")
        told = [_frame(one) for one in error["frames"]] if error else []
        self.frames.setText("<br>".join(told))
        self.frames.setVisible(bool(told))

    def say(self, sentence: str, *, reload: bool = False) -> None:
        """A sentence below the text; with a button to read the file again."""
        self.trouble.setText(sentence)
        self.trouble.setVisible(bool(sentence))
        self.reload.setVisible(reload)

    @property
    def is_edited(self) -> bool:
        return self._stack.currentIndex() == 1 and self.editor.document().isModified()

    def _show_state(self) -> None:
        self.path.setText(f"{self._name} – edited" if self.is_edited else self._name)
        self.path.setToolTip(self._name)

    def _lay_out(self) -> None:
        there = QWidget()
        column = QVBoxLayout(there)
        column.setContentsMargins(12, theme.SPACE, 12, 12)
        column.setSpacing(theme.SPACE)
        head = QHBoxLayout()
        head.addWidget(self.path, 1)
        head.addWidget(self.save)
        below = QHBoxLayout()
        below.addWidget(self.trouble, 1)
        below.addWidget(self.reload, 0, Qt.AlignmentFlag.AlignTop)
        column.addLayout(head)
        column.addWidget(self.editor, 1)
        column.addLayout(below)
        column.addWidget(self.frames)
        self._stack = QStackedLayout(self)
        self._stack.setContentsMargins(0, 0, 0, 0)
        self._stack.addWidget(self._nothing())
        self._stack.addWidget(there)

    def _nothing(self) -> QWidget:
        nothing = QWidget()
        column = QVBoxLayout(nothing)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(12)
        centre = Qt.AlignmentFlag.AlignCenter
        column.addStretch(2)
        column.addWidget(label("No reward file", theme.heading_font(), align=centre))
        told = "Write functions of your own in Python, and see at once what they give."
        column.addWidget(label(told, role="muted", wrap=True, align=centre))
        buttons = QHBoxLayout()
        self.new, self.open = (
            button("New file…", self.new_requested.emit, primary=True),
            button("Open…", self.open_requested.emit),
        )
        buttons.addStretch()
        buttons.addWidget(self.new)
        buttons.addWidget(self.open)
        buttons.addStretch()
        column.addLayout(buttons)
        column.addStretch(3)
        return nothing


def _frame(one: Mapping[str, Any]) -> str:
    place = f"line {one['line']}, in {html.escape(one['function'])}"
    link = f'<a style="color:{theme.palette().accent.name()}" href="{one["line"]}">{place}</a>'
    return f"{link}&nbsp;&nbsp;{html.escape(one['code'])}"
