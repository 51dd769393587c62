"""One row in full: the exact prompt that the model will see, special tokens as chips; the same as ids; the row's columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PySide6.QtGui import QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QFrame, QHBoxLayout, QTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.labels_and_buttons import label
from app.widgets.basic.segments import Segments

VIEWS = {"prompt": "Prompt", "ids": "Ids", "columns": "Columns"}
LOADING = "The tokenizer is being loaded; until then these are the messages."
NO_TEMPLATE = "This model has no chat template: the messages are put together as plain text."


class RowDetail(QFrame):
    """Shows what `preview_row` answers."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self._said: Mapping[str, Any] | None = None
        self._prompt_limit = 0
        self.title = label(font=theme.heading_font())
        self.about = ElidedLabel()
        self.about.setFont(theme.figures_font(12))
        self.note = label(font=theme.caption_font(), role="problem", wrap=True, selectable=True)
        self.pane = QTextEdit(readOnly=True, acceptRichText=False)
        self.pane.setFont(theme.mono_font())
        self.pane.setAccessibleName("The prompt as the model sees it")
        self.pane.setTabChangesFocus(True)
        self.views = Segments(VIEWS, "Show the row as")
        self.views.chosen.connect(lambda _: self._draw())
        self._lay_out()
        self._draw()
        theme.signals.changed.connect(self._draw)

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(2)
        head.addWidget(self.title)
        head.addStretch(1)
        head.addWidget(self.views)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 8, 12, 12)
        column.setSpacing(6)
        column.addLayout(head)
        column.addWidget(self.about)
        column.addWidget(self.note)
        column.addWidget(self.pane, 1)

    # What is shown

    def show_nothing(self) -> None:
        self._said = None
        self.title.setText("")
        self._draw()

    def show_row(self, index: int, said: Mapping[str, Any], prompt_limit: int) -> None:
        """`index` from 0; `prompt_limit` is how many tokens a prompt may have."""
        self._said, self._prompt_limit = said, prompt_limit
        self.title.setText(f"Row {index + 1:,}")
        self._draw()

    def set_prompt_limit(self, prompt_limit: int) -> None:
        self._prompt_limit = prompt_limit
        self._draw_words()

    def _draw(self) -> None:
        self._draw_words()
        self.pane.clear()
        if self._said is None:
            return
        cursor = QTextCursor(self.pane.document())
        cursor.beginEditBlock()
        has_prompt = bool(self._said["messages"])  # of a row that cannot be used, what there is can still be seen
        writers = {"prompt": self._write_prompt, "ids": self._write_ids}
        writers.get(self.views.key if has_prompt else "", self._write_columns)(cursor, self._said)
        cursor.endEditBlock()
        self.pane.moveCursor(QTextCursor.MoveOperation.Start)

    def _draw_words(self) -> None:
        said = self._said or {}
        tokens = said.get("tokens")
        parts = [] if tokens is None else [_told(tokens, self._prompt_limit)]
        parts += [f"{name}: {said[key]}" for name, key in (("Answer", "answer"), ("Type", "type")) if said.get(key)]
        self.about.setText("   ".join(parts))
        self.about.setToolTip(self.about.text()[:400])
        self.about.setVisible(bool(parts))
        self.views.setEnabled(bool(said))
        notes = [fault["sentence"] for fault in said.get("faults", ())]
        notes += [too_long(tokens, self._prompt_limit)] if tokens is not None and tokens > self._prompt_limit else []
        notes += [LOADING] if said.get("loading") and not notes else []
        notes += [] if said.get("has_template", True) else [NO_TEMPLATE]
        self.note.setText("\n".join(notes))
        self.note.setVisible(bool(notes))

    def _write_prompt(self, cursor: QTextCursor, said: Mapping[str, Any]) -> None:
        for piece in said["pieces"]:
            cursor.insertText(piece["text"], _chip() if piece["special"] else _plain())
        if said["tokens"] is None:  # no tokenizer, or not yet
            for place, message in enumerate(said["messages"]):
                cursor.insertText("\n\n" * bool(place) + message["role"], _quiet())
                cursor.insertText(f"\n{message['content']}", _plain())
        self._write_rest(cursor, said)

    def _write_ids(self, cursor: QTextCursor, said: Mapping[str, Any]) -> None:
        for place, piece in enumerate(said["pieces"]):
            cursor.insertText(" " * bool(place), _plain())
            cursor.insertText(" ".join(map(str, piece["ids"])), _chip() if piece["special"] else _plain())
        self._write_rest(cursor, said)

    def _write_rest(self, cursor: QTextCursor, said: Mapping[str, Any]) -> None:
        """How much of a very long prompt was not sent."""
        missing = (said["tokens"] or 0) - sum(len(piece["ids"]) for piece in said["pieces"])
        if missing > 0:
            cursor.insertText(f"\n… and {missing:,} more tokens", _quiet())

    def _write_columns(self, cursor: QTextCursor, said: Mapping[str, Any]) -> None:
        for place, cell in enumerate(said["cells"]):
            cursor.insertText("\n\n" * bool(place) + cell["name"], _quiet())
            cursor.insertText(f"\n{cell['text']}", _plain())


def _told(tokens: int, prompt_limit: int) -> str:
    return f"{tokens:,} {'token' if tokens == 1 else 'tokens'} of {max(0, prompt_limit):,}"


def too_long(tokens: int, prompt_limit: int) -> str:
    return f"Too long by {tokens - prompt_limit:,}: training leaves this row out."


def _chip() -> QTextCharFormat:
    form = QTextCharFormat()
    form.setBackground(theme.palette().selection)
    form.setForeground(theme.palette().accent)
    return form


def _plain() -> QTextCharFormat:
    form = QTextCharFormat()
    form.setForeground(theme.palette().text)
    return form


def _quiet() -> QTextCharFormat:
    form = QTextCharFormat()
    form.setForeground(theme.palette().muted)
    return form
