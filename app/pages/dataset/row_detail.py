"""One row of the dataset in full: the rendered prompt with special tokens highlighted, its token ids, or the columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PySide6.QtGui import QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QFrame, QHBoxLayout, QTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.labels_and_buttons import label, plain_tip
from app.widgets.basic.segmented_control import Segments

VIEWS = {"prompt": "Prompt", "ids": "Ids", "columns": "Columns"}
LOADING = "The tokenizer is being loaded; until then these are the messages."
NO_TEMPLATE = "This model has no chat template: the messages are put together as plain text."


class RowDetail(QFrame):
    """Shows the answer of the service's `preview_row`: messages, pieces of the rendered prompt, token ids, cells."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self._preview: Mapping[str, Any] | None = None
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

    # Showing

    def show_nothing(self) -> None:
        """Show no row."""
        self._preview = None
        self.title.setText("")
        self._draw()

    def show_row(self, index: int, preview: Mapping[str, Any], prompt_limit: int) -> None:
        """Show row `index` (from 0); `prompt_limit`: most tokens of a prompt."""
        self._preview, self._prompt_limit = preview, prompt_limit
        self.title.setText(f"Row {index + 1:,}")
        self._draw()

    def set_prompt_limit(self, prompt_limit: int) -> None:
        self._prompt_limit = prompt_limit
        self._show_facts()

    def _draw(self) -> None:
        self._show_facts()
        self.pane.clear()
        if self._preview is None:
            return
        cursor = QTextCursor(self.pane.document())
        cursor.beginEditBlock()
        has_prompt = bool(self._preview["messages"])  # a row that cannot be used shows its columns
        writers = {"prompt": self._write_prompt, "ids": self._write_ids}
        writers.get(self.views.key if has_prompt else "", self._write_columns)(cursor, self._preview)
        cursor.endEditBlock()
        self.pane.moveCursor(QTextCursor.MoveOperation.Start)

    def _show_facts(self) -> None:
        """Length, answer and type above the text; faults and notes below them."""
        preview = self._preview or {}
        tokens = preview.get("tokens")
        parts = [] if tokens is None else [_length_text(tokens, self._prompt_limit)]
        labels = (("Answer", "answer"), ("Type", "type"))
        parts += [f"{name}: {preview[key]}" for name, key in labels if preview.get(key)]
        self.about.setText("   ".join(parts))
        self.about.setToolTip(plain_tip(self.about.text()[:400]))
        self.about.setVisible(bool(parts))
        self.views.setEnabled(bool(preview))
        notes = [fault["sentence"] for fault in preview.get("faults", ())]
        if tokens is not None and tokens > self._prompt_limit:
            kept = preview.get("kept")
            notes.append(cut(tokens, kept) if kept else too_long(tokens, self._prompt_limit))
        notes += [LOADING] if preview.get("loading") and not notes else []
        notes += [] if preview.get("has_template", True) else [NO_TEMPLATE]
        self.note.setText("\n".join(notes))
        self.note.setVisible(bool(notes))

    def _write_prompt(self, cursor: QTextCursor, preview: Mapping[str, Any]) -> None:
        for piece in preview["pieces"]:
            cursor.insertText(piece["text"], _special() if piece["special"] else _plain())
        if preview["tokens"] is None:  # there is no tokenizer, or it is still being loaded
            for i, message in enumerate(preview["messages"]):
                cursor.insertText("\n\n" * bool(i) + message["role"], _muted())
                cursor.insertText(f"\n{message['content']}", _plain())
        self._write_remainder(cursor, preview)

    def _write_ids(self, cursor: QTextCursor, preview: Mapping[str, Any]) -> None:
        for i, piece in enumerate(preview["pieces"]):
            cursor.insertText(" " * bool(i), _plain())
            cursor.insertText(" ".join(map(str, piece["ids"])), _special() if piece["special"] else _plain())
        self._write_remainder(cursor, preview)

    def _write_remainder(self, cursor: QTextCursor, preview: Mapping[str, Any]) -> None:
        """Append how many tokens of a very long prompt the service has left out of its answer."""
        missing = (preview.get("kept") or preview["tokens"] or 0) - sum(
            len(piece["ids"]) for piece in preview["pieces"]
        )
        if missing > 0:
            cursor.insertText(f"\n… and {missing:,} more tokens", _muted())

    def _write_columns(self, cursor: QTextCursor, preview: Mapping[str, Any]) -> None:
        for i, cell in enumerate(preview["cells"]):
            cursor.insertText("\n\n" * bool(i) + cell["name"], _muted())
            cursor.insertText(f"\n{cell['text']}", _plain())


def _length_text(tokens: int, prompt_limit: int) -> str:
    return f"{tokens:,} {'token' if tokens == 1 else 'tokens'} of {max(0, prompt_limit):,}"


def too_long(tokens: int, prompt_limit: int) -> str:
    return f"Too long by {tokens - prompt_limit:,}: training leaves this row out."


def cut(tokens: int, kept: int) -> str:
    return f"Too long: the beginning of its last user message is cut off. {kept:,} of {tokens:,} tokens are left, shown here."


def _special() -> QTextCharFormat:
    made = QTextCharFormat()
    made.setBackground(theme.palette().selection)
    made.setForeground(theme.palette().accent)
    return made


def _plain() -> QTextCharFormat:
    made = QTextCharFormat()
    made.setForeground(theme.palette().text)
    return made


def _muted() -> QTextCharFormat:
    made = QTextCharFormat()
    made.setForeground(theme.palette().muted)
    return made
