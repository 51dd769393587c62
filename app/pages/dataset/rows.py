"""The rows of a dataset as a table with a lazy model: chunks of rows are requested as they scroll into view."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt, QTimer, Signal
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QResizeEvent, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QAbstractItemView, QFrame, QHBoxLayout, QHeaderView, QTextEdit, QVBoxLayout, QWidget

from app import theme
from app.theme import CELL_PADDING
from app.widgets.basic.controls import ElidedLabel, Segments
from app.widgets.basic.labels import label, plain_tip
from app.widgets.basic.tables import BaseTable

Index = QModelIndex | QPersistentModelIndex
CHUNK = 100
"""Rows of a chunk: more than a screen of them."""
MAX_REQUESTS = 2
"""Chunks requested at a time: the view covers two at most, and those that were scrolled past are not needed."""
MAX_CHUNKS = 60
"""Chunks that are kept; the least recently used is dropped first."""
PLACEHOLDER = "…"
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
MIN_WIDE_WIDTH, MIN_WIDTH, MAX_WIDTH = 160, 56, 200
"""Width in pixels: least of the widest column (a narrow table scrolls sideways), least and most of the others."""
MEASURED_ROWS, MEASURED_CHARS = 30, 200
"""Rows, and leading characters of each, that decide how wide a column is."""
ROW, TOKENS, FIRST = 0, 1, 2
"""Columns: the row's number, the tokens of its prompt, then the dataset's own."""


@dataclass(frozen=True, slots=True)
class ColumnHeading:
    """A column of the dataset: its name, its use ("" if none), `right` for numbers, `wide` if it gets the spare width."""

    name: str
    use: str = ""
    right: bool = False
    wide: bool = False


class RowModel(QAbstractTableModel):
    """A table model that holds the chunks of rows that were last visible.

    Attributes:
        headings – the dataset's columns.

    Signals:
        chunk_requested(first row) – rows are visible that the model does not have; answer with `add_chunk` or `release`.
    """

    chunk_requested = Signal(int)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.headings: list[ColumnHeading] = []
        self._count = self._prompt_limit = 0
        self._chunks: OrderedDict[int, tuple[Sequence[Mapping[str, str]], Sequence[int | None]]] = OrderedDict()
        self._missing: list[int] = []
        self._requested: set[int] = set()
        # Requested after a pause, when the view has painted: while the scroll bar is dragged through the whole table,
        # only the chunk where it comes to rest is needed.
        self._request_timer = QTimer(self, singleShot=True, interval=20)
        self._request_timer.timeout.connect(self._request)
        theme.signals.changed.connect(self._repaint)

    def show_rows(self, count: int, headings: Sequence[ColumnHeading], prompt_limit: int) -> None:
        """Show another dataset of `count` rows, none of them fetched yet. `prompt_limit`: most tokens of a prompt."""
        self.beginResetModel()
        self.headings, self._count, self._prompt_limit = list(headings), count, prompt_limit
        self._chunks.clear()
        self._requested.clear()
        self._missing.clear()
        self.endResetModel()

    def set_prompt_limit(self, prompt_limit: int) -> None:
        self._prompt_limit = prompt_limit
        self._repaint()

    def forget(self) -> None:
        """Request the visible chunks again (their tokens can be counted now); their rows stay until the answer comes."""
        # The most recently used chunks are those on screen. Dropping these too would make the table flash placeholders.
        for start in list(self._chunks)[:-MAX_REQUESTS]:
            del self._chunks[start]
        for start in self._chunks:
            self._schedule(start)

    def add_chunk(self, start: int, rows: Sequence[Mapping[str, str]], tokens: Sequence[int | None]) -> None:
        """Add a requested chunk: cells by column name, and the tokens of each prompt (None if unknown)."""
        self._requested.discard(start)
        self._chunks[start] = (rows, tokens)
        self._chunks.move_to_end(start)
        while len(self._chunks) > MAX_CHUNKS:
            self._chunks.popitem(last=False)
        if self._count:  # one signal for the chunk: the view repaints what it shows of it
            last = min(start + CHUNK, self._count) - 1
            self.dataChanged.emit(self.index(start, 0), self.index(last, self.columnCount() - 1))
        self._request()

    def release(self, start: int) -> None:
        """A requested chunk will not come; it is requested again when it is visible again."""
        self._requested.discard(start)
        self._request()

    def _schedule(self, start: int) -> None:
        """Schedule the request of a visible chunk; of more than MAX_REQUESTS, only the newest are kept.

        A running timer is not restarted: during constant scrolling it would never fire.
        """
        self._missing = [*(other for other in self._missing if other != start), start][-MAX_REQUESTS:]
        if not self._request_timer.isActive():
            self._request_timer.start()

    def _request(self) -> None:
        while self._missing and len(self._requested) < MAX_REQUESTS:
            start = self._missing.pop()
            if start not in self._requested:
                self._requested.add(start)
                self.chunk_requested.emit(start)

    def _row(self, row: int) -> tuple[Mapping[str, str], int | None] | None:
        """(cells, tokens) of a row; None if the model does not have it, and then its chunk is requested."""
        start = row - row % CHUNK
        chunk = self._chunks.get(start)
        if chunk is None:
            if start not in self._requested:
                self._schedule(start)
            return None  # the view is painting and cannot wait; `add_chunk` makes it paint the row again
        self._chunks.move_to_end(start)
        rows, tokens = chunk
        return (rows[row - start], tokens[row - start]) if row - start < len(rows) else ({}, None)

    def _repaint(self) -> None:
        if self._count:
            self.dataChanged.emit(self.index(0, 0), self.index(self._count - 1, self.columnCount() - 1))

    # QAbstractTableModel

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else self._count

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() or not self.headings else FIRST + len(self.headings)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal or section >= self.columnCount():
            return None
        heading = self.headings[section - FIRST] if section >= FIRST else None
        if role == Qt.ItemDataRole.DisplayRole:
            if heading is None:
                return ("Row", "Tokens")[section]
            return f"{heading.name} → {heading.use}" if heading.use not in ("", heading.name) else heading.name
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _RIGHT if heading is None or heading.right else _LEFT
        return None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        column = index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(index.row(), column)
        if role == Qt.ItemDataRole.ForegroundRole:
            return self._colour(index.row(), column)
        heading = self.headings[column - FIRST] if column >= FIRST else None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _RIGHT if heading is None or heading.right else _LEFT
        if role == Qt.ItemDataRole.FontRole and (heading is None or heading.right):
            return theme.figures_font()
        return None

    def text_of(self, row: int, column: int) -> str:
        """The text of a cell of the dataset's own columns, "" if the model does not have it; requests nothing."""
        chunk = self._chunks.get(row - row % CHUNK)
        rows = chunk[0] if chunk else ()
        return rows[row % CHUNK].get(self.headings[column - FIRST].name, "") if row % CHUNK < len(rows) else ""

    def _text(self, row: int, column: int) -> str:
        if column == ROW:
            return f"{row + 1:,}"
        cells_and_tokens = self._row(row)
        if cells_and_tokens is None:
            return PLACEHOLDER
        cells, tokens = cells_and_tokens
        if column == TOKENS:
            return f"{tokens:,}" if tokens is not None else ""
        return " ".join(cells.get(self.headings[column - FIRST].name, "").split())

    def _colour(self, row: int, column: int) -> QColor:
        colours = theme.palette()
        if column == TOKENS:
            # Read past `_row`: the text of this cell has requested the chunk already, a colour need not.
            chunk = self._chunks.get(row - row % CHUNK)
            length = chunk[1][row % CHUNK] if chunk and row % CHUNK < len(chunk[1]) else None
            return colours.warning if length is not None and length > self._prompt_limit else colours.muted
        return colours.text if column >= FIRST and self.headings[column - FIRST].use else colours.muted


class RowTable(BaseTable):
    """The table view over a RowModel.

    Signals:
        chosen(row) – the current row changed.
        selected – the selection changed.
    """

    chosen = Signal(int)
    selected = Signal()

    def __init__(self, model: RowModel) -> None:
        super().__init__()
        self._rows, self._placeholder = model, ""
        self.setModel(model)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setAccessibleName("Rows of the dataset")
        self.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.setCornerWidget(QWidget())  # else there is a square of another colour between the scroll bars
        header = self.horizontalHeader()
        # Not ResizeToContents: to measure cells, Qt would read up to 1,000 rows and so request chunks that are not visible.
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        header.setMinimumSectionSize(48)
        self.selectionModel().currentRowChanged.connect(lambda now, _: now.isValid() and self.chosen.emit(now.row()))
        self.selectionModel().selectionChanged.connect(lambda *_: self.selected.emit())
        model.dataChanged.connect(self._on_rows)

    def reset_view(self, placeholder: str = "") -> None:
        """After `show_rows`: size the columns, select the first row; `placeholder` is the text if there is none."""
        self.set_placeholder(placeholder)
        self._resize_columns()
        if self._rows.rowCount():
            self.selectRow(0)

    def selected_ranges(self) -> list[range]:
        """The selected rows as ascending ranges: all rows of a large dataset are one range, not a list of a million."""
        selection: Any = self.selectionModel().selection()  # PySide's stub does not say that it can be iterated over
        return sorted((range(part.top(), part.bottom() + 1) for part in selection), key=lambda part: part.start)

    def set_placeholder(self, placeholder: str) -> None:
        """Set the text shown while there are no rows."""
        if placeholder != self._placeholder:
            self._placeholder = placeholder
            self.setAccessibleDescription(placeholder)
            self.viewport().update()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._resize_columns()

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if self._placeholder and not self._rows.rowCount():
            painter = QPainter(self.viewport())  # a scroll area's paint event is its viewport's
            painter.setPen(theme.palette().muted)
            painter.setFont(theme.body_font())
            flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
            painter.drawText(self.viewport().rect().adjusted(24, 8, -24, -8), flags, self._placeholder)

    def _on_rows(self, first: QModelIndex, _last: QModelIndex) -> None:
        """Size the columns again when the first rows have come: their texts decide the widths."""
        if first.row() == 0:
            self._resize_columns()

    def _resize_columns(self) -> None:
        """Size the columns by heading and first rows, within limits; the wide one (the prompt) gets the remaining width."""
        headings = self._rows.headings
        if not headings:
            return
        digits = self.fontMetrics().horizontalAdvance(f"{self._rows.rowCount():,}") + 2 * CELL_PADDING + 6
        self.setColumnWidth(ROW, max(theme.scaled(52), digits))
        tokens = theme.scaled(68)
        self.setColumnWidth(TOKENS, tokens)
        widths = {column: self._text_width(column) for column in range(FIRST, FIRST + len(headings))}
        wide = next((column for column in widths if headings[column - FIRST].wide), FIRST)
        others = sum(width for column, width in widths.items() if column != wide)
        least = min(theme.scaled(MIN_WIDE_WIDTH), widths[wide])
        widths[wide] = max(least, self.viewport().width() - self.columnWidth(ROW) - tokens - others)
        for column, width in widths.items():
            self.setColumnWidth(column, width)

    def _text_width(self, column: int) -> int:
        heading = str(self._rows.headerData(column, Qt.Orientation.Horizontal))
        heading_width = self.horizontalHeader().fontMetrics().horizontalAdvance(heading)
        texts = (self._rows.text_of(row, column)[:MEASURED_CHARS] for row in range(MEASURED_ROWS))
        cell_width = max(map(self.fontMetrics().horizontalAdvance, texts))
        least, most = theme.scaled(MIN_WIDTH), max(theme.scaled(MAX_WIDTH), self.viewport().width() // 4)
        return max(least, min(most, max(heading_width, cell_width) + 2 * CELL_PADDING + 10))


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
