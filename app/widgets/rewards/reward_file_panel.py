"""The reward file beside the scores: an editor for its text, the last error, and the user's lines of the traceback.

It reads and writes no file; signals ask the page to.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QStackedLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.labels_and_buttons import PlainLabel, button, label, plain_tip
from app.widgets.rewards.code_editor import CodeEditor


class RewardFilePanel(QFrame):
    """A card with the editor, or with two buttons while no file is chosen.

    Attributes:
        editor – the code editor.
        trouble, frames – labels of the error sentence and of the traceback's lines.

    Signals:
        save_requested, score_requested, new_requested, open_requested, reload_requested.
    """

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
        self.frames = PlainLabel(wordWrap=True)
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
        """Show a file's path and text; text None means that no file is chosen."""
        self._name = name
        self._stack.setCurrentIndex(0 if text is None else 1)
        if text is not None:
            self.editor.show_text(text)
        self._show_state()

    def show_error(self, error: Mapping[str, Any] | None) -> None:
        """Show an error of the file: mark its line, show its sentence and the user's own traceback frames."""
        self.editor.show_problem(error["line"] if error else 0, error["sentence"] if error else "")
        self.say(error["sentence"] if error else "")
        frames = [_frame_html(frame) for frame in error["frames"]] if error else []
        self.frames.setText("<br>".join(frames))
        self.frames.setVisible(bool(frames))

    def say(self, sentence: str, *, reload: bool = False) -> None:
        """Show a sentence below the editor, "" for none; `reload` adds a button to read the file again."""
        self.trouble.setText(sentence)
        self.trouble.setVisible(bool(sentence))
        self.reload.setVisible(reload)

    @property
    def is_edited(self) -> bool:
        """Whether the text has unsaved changes."""
        return self._stack.currentIndex() == 1 and self.editor.document().isModified()

    def _show_state(self) -> None:
        self.path.setText(f"{self._name} – edited" if self.is_edited else self._name)
        self.path.setToolTip(plain_tip(self._name))

    def _lay_out(self) -> None:
        page = QWidget()
        column = QVBoxLayout(page)
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
        self._stack.addWidget(self._empty_page())
        self._stack.addWidget(page)

    def _empty_page(self) -> QWidget:
        page = QWidget()
        column = QVBoxLayout(page)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(12)
        centre = Qt.AlignmentFlag.AlignCenter
        column.addStretch(2)
        column.addWidget(label("No reward file", theme.heading_font(), align=centre))
        sentence = "Write functions of your own in Python, and see at once what they give. Or drop a file here."
        column.addWidget(label(sentence, role="muted", wrap=True, align=centre))
        buttons = QHBoxLayout()
        self.new = button("New file…", self.new_requested.emit, primary=True)
        self.open = button("Open…", self.open_requested.emit)
        buttons.addStretch()
        buttons.addWidget(self.new)
        buttons.addWidget(self.open)
        buttons.addStretch()
        column.addLayout(buttons)
        column.addStretch(3)
        return page


def _frame_html(frame: Mapping[str, Any]) -> str:
    """A traceback frame: a link to its line, and the line's code."""
    text = f"line {frame['line']}, in {html.escape(frame['function'])}"
    link = f'<a style="color:{theme.palette().accent.name()}" href="{frame["line"]}">{text}</a>'
    return f"{link}&nbsp;&nbsp;{html.escape(frame['code'])}"
