"""The rows of a dataset: a table that requests chunks of rows as they scroll into view, and one row in full."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QModelIndex, QObject, Qt, QTimer, Signal
from PySide6.QtGui import QFont, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QFrame, QHeaderView, QTextEdit, QWidget

from app import theme
from app.state.dataset import Dataset
from app.theme import CELL_PADDING
from app.widgets.basic.controls import ElidedLabel, Segments
from app.widgets.basic.labels import label, plain_tip, show_text
from app.widgets.basic.layout import column, configure, row
from app.widgets.basic.number_format import counted
from app.widgets.basic.tables import ROW_HEIGHT, BaseTable, CellDelegate, Column, Index, RowsModel
from app.widgets.pictures import IN_A_CELL, PictureStrip, draw_pictures, pictures

CHUNK = 100  # rows of a chunk: more than a screen of them
MAX_REQUESTS = 2  # chunks requested at a time: the view covers two at most
MAX_CHUNKS = 60
PLACEHOLDER = "…"
GONE: Mapping[str, Any] = {"cells": {}, "tokens": None, "images": ()}  # a row that the dataset no longer has
MIN_WIDE_WIDTH, MIN_WIDTH, MAX_WIDTH = 160, 56, 200  # pixels: least of the widest column, least and most of the others
MEASURED_ROWS, MEASURED_CHARS = 30, 200
ROW, TOKENS, SOLVED = 0, 1, 2  # columns: row number, prompt's tokens, how often a run solved it; then the dataset's own
PICTURES = Column("Pictures")
PICTURES_ROLE, AS_TEXT = Qt.ItemDataRole.UserRole, Qt.ItemDataRole.AccessibleTextRole
PICTURE_ROW = 46  # height of a row with pictures
VIEWS = {"prompt": "Prompt", "ids": "Ids", "columns": "Columns"}


@dataclass(frozen=True, slots=True)
class DataColumn(Column):
    """A column of the dataset: `name` in the dataset, its `use`, and `wide` if it gets the spare width."""

    name: str = ""
    use: str = ""
    wide: bool = False


class RowModel(RowsModel):
    """The rows' numbers as rows; it holds the chunks that were last visible, and requests others."""

    chunk_requested = Signal(int)  # first place in `numbers`
    columns: list[Column]

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.columns, self.prompt_limit = [], 0  # most tokens of a prompt
        self.most_pictures = 0  # of a row so far
        self.numbers: Sequence[int] = ()  # of the dataset's rows, in the order shown
        self.solved: Mapping[int, str] = {}  # “3 of 8”, by row of the dataset
        self._chunks: OrderedDict[int, Sequence[Mapping[str, Any]]] = OrderedDict()
        self._missing: list[int] = []
        self._requested: set[int] = set()
        # Requested after a pause: while the scroll bar is dragged, only the chunk where it comes to rest is needed.
        self._request_timer = configure(QTimer(self, singleShot=True, interval=20), timeout=self._request)

    def show_rows(self, numbers: Sequence[int], columns: Sequence[DataColumn]) -> None:
        self.beginResetModel()
        figures = [Column("Row", is_figure=True), Column("Tokens", is_figure=True)]
        figures += [Column("Solved", is_figure=True)] if self.solved else []
        self.columns = [*figures, *columns] if columns else []
        self.numbers, self.rows = numbers, range(len(numbers))
        for held in (self._chunks, self._requested, self._missing):
            held.clear()
        self.most_pictures = 0
        self.endResetModel()

    def forget(self) -> None:
        for start in list(self._chunks)[:-MAX_REQUESTS]:  # the most recently used chunks are those on screen
            del self._chunks[start]
        for start in self._chunks:
            self._schedule(start)

    def add_chunk(self, start: int, rows: Sequence[Mapping[str, Any]] | None) -> None:
        """Add a requested chunk: each row's cells by column, the tokens of its prompt (None if unknown), its images.
        None: it could not be read."""
        self._requested.discard(start)
        if rows is not None:
            self._chunks[start] = rows
            self._chunks.move_to_end(start)
            while len(self._chunks) > MAX_CHUNKS:
                self._chunks.popitem(last=False)
            self.most_pictures = max([self.most_pictures, *(len(row["images"]) for row in rows)])
            if self.most_pictures and PICTURES not in self.columns:
                at = next((at for at, each in enumerate(self.columns) if isinstance(each, DataColumn)), 0)
                self.beginInsertColumns(QModelIndex(), at, at)
                self.columns.insert(at, PICTURES)
                self.endInsertColumns()
            if self.rows:
                last = min(start + CHUNK, len(self.rows)) - 1
                self.dataChanged.emit(self.index(start, 0), self.index(last, self.columnCount() - 1))
        self._request()

    def _schedule(self, start: int) -> None:
        self._missing = [*(other for other in self._missing if other != start), start][-MAX_REQUESTS:]
        if not self._request_timer.isActive():  # restarted, it would never fire during constant scrolling
            self._request_timer.start()

    def _request(self) -> None:
        while self._missing and len(self._requested) < MAX_REQUESTS:
            start = self._missing.pop()
            if start not in self._requested:
                self._requested.add(start)
                self.chunk_requested.emit(start)

    def held(self, row: int) -> Mapping[str, Any] | None:
        """A row of `add_chunk`; None while it is not here."""
        chunk, place = self._chunks.get(row - row % CHUNK), row % CHUNK
        return None if chunk is None else chunk[place] if place < len(chunk) else GONE

    def text(self, row: int, column: int) -> str:
        if column == ROW:
            return f"{self.numbers[row] + 1:,}"
        if column == SOLVED and not isinstance(self.columns[column], DataColumn):
            return self.solved.get(self.numbers[row], "")
        start, held, about = row - row % CHUNK, self.held(row), self.columns[column]
        if held is None:
            if start not in self._requested:
                self._schedule(start)
            return PLACEHOLDER
        self._chunks.move_to_end(start)
        if isinstance(about, DataColumn):
            return " ".join(held["cells"].get(about.name, "").split())
        return f"{held['tokens']:,}" if column == TOKENS and held["tokens"] is not None else ""

    def colour(self, row: int, column: int) -> str:
        if column == TOKENS and (held := self.held(row)) is not None:
            return "warning" if held["tokens"] is not None and held["tokens"] > self.prompt_limit else "muted"
        about = self.columns[column]
        return "text" if isinstance(about, DataColumn) and about.use else "muted"

    def font(self, row: int, column: int) -> QFont | None:
        return theme.figures_font() if self.columns[column].is_figure else None

    def extra(self, row: int, index: Index, role: int) -> Any:
        if self.columns[index.column()] is not PICTURES or role not in (PICTURES_ROLE, AS_TEXT):
            return None
        paths = (self.held(row) or GONE)["images"]
        return paths if role == PICTURES_ROLE else ", ".join(Path(path).name for path in paths)


class RowTable(BaseTable):
    copy_requested = Signal()  # rows that were never in view have to be requested first

    def __init__(self, model: RowModel) -> None:
        super().__init__(model=model, name="Rows of the dataset", textElideMode=Qt.TextElideMode.ElideRight)
        self._rows = model
        self.setCornerWidget(QWidget())  # else there is a square of another colour between the scroll bars
        # Not ResizeToContents, which would read up to 1,000 rows and so request chunks that are not visible.
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        self.horizontalHeader().setMinimumSectionSize(48)
        self.setItemDelegate(CellDelegate(PICTURES_ROLE, draw_pictures, self))
        pictures().arrived.connect(self.viewport().update)
        model.columnsInserted.connect(self.fit_columns)
        model.columnsInserted.connect(lambda: self.selectRow(self.currentIndex().row()))  # the new cell is not selected
        model.dataChanged.connect(lambda first, _: first.row() == 0 and self.fit_columns())

    def reset_view(self) -> None:
        self.fit_columns()
        if self._rows.rowCount():
            self.selectRow(0)

    def selected_ranges(self) -> list[range]:
        selection: Any = self.selectionModel().selection()  # PySide's stub does not say that it can be iterated over
        return sorted((range(part.top(), part.bottom() + 1) for part in selection), key=lambda part: part.start)

    def copy(self) -> None:
        self.copy_requested.emit()

    def fit_columns(self) -> None:
        columns, advance = self._rows.columns, self.fontMetrics().horizontalAdvance
        if not columns:
            return
        height = PICTURE_ROW if self._rows.most_pictures else ROW_HEIGHT
        self.verticalHeader().setDefaultSectionSize(theme.scaled(height))
        digits = advance(f"{self._rows.rowCount():,}") + 2 * CELL_PADDING + 6
        widths, wide = {ROW: max(theme.scaled(52), digits), TOKENS: theme.scaled(68), SOLVED: theme.scaled(96)}, SOLVED
        least, most = theme.scaled(MIN_WIDTH), max(theme.scaled(MAX_WIDTH), self.viewport().width() // 4)
        measured = [held["cells"] for held in map(self._rows.held, range(MEASURED_ROWS)) if held is not None]
        for place, each in enumerate(columns):
            if isinstance(each, DataColumn):
                texts = [self.horizontalHeader().fontMetrics().horizontalAdvance(each.title)]
                texts += [advance(cells.get(each.name, "")[:MEASURED_CHARS]) for cells in measured]
                widest = least if each.name in ("image", "images") else most  # PICTURES shows what they name
                widths[place] = max(least, min(widest, max(texts) + 2 * CELL_PADDING + 10))
                wide = place if each.wide else wide
            elif each is PICTURES:
                count = min(self._rows.most_pictures, IN_A_CELL + 1)
                widths[place] = theme.scaled(max(MIN_WIDTH + 8, count * PICTURE_ROW))
        others = sum(width for place, width in widths.items() if place != wide)
        least = min(theme.scaled(MIN_WIDE_WIDTH), widths[wide])
        widths[wide] = max(least, self.viewport().width() - others)
        for place, width in widths.items():
            self.setColumnWidth(place, width)


class RowDetail(QFrame):
    def __init__(self, dataset: Dataset, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self._dataset = dataset
        self._preview: Mapping[str, Any] | None = None
        self.title = label(font=theme.heading_font())
        self.about = ElidedLabel(font=theme.figures_font(12))
        self.note = label(font=theme.caption_font(), role="problem", wrap=True, selectable=True)
        self.pane = QTextEdit(readOnly=True, acceptRichText=False, tabChangesFocus=True)
        configure(self.pane, font=theme.mono_font(), accessibleName="The prompt as the model sees it")
        self.views = Segments(VIEWS, "Show the row as", chosen=self._draw)
        head = row(self.title, None, self.views, spacing=2)
        self.pictures = PictureStrip()
        body = (row(self.pictures, (self.pane, 1)), 1)
        column(head, self.about, self.note, body, into=self, spacing=6, margins=(12, 8, 12, 12))
        self._draw()
        theme.signals.changed.connect(self._draw)

    def show_row(self, index: int, preview: Mapping[str, Any] | None) -> None:
        """Show row `index` (from 0), None for nothing."""
        self._preview = preview
        self.title.setText(f"Row {index + 1:,}" if preview is not None else "")
        self._draw()

    def show_facts(self) -> None:
        preview, limit = self._preview or {}, self._dataset.prompt_limit
        tokens = preview.get("tokens")
        parts = [] if tokens is None else [f"{counted(tokens, 'token')} of {max(0, limit):,}"]
        pictures = preview.get("images", ())
        if of_pictures := sum(picture["tokens"] or 0 for picture in pictures):
            parts.append(f"{counted(len(pictures), 'picture')}: {counted(of_pictures, 'token')}")
        self.pictures.show_pictures([picture["path"] for picture in pictures])
        parts += [f"{key.capitalize()}: {preview[key]}" for key in ("answer", "type") if preview.get(key)]
        show_text(self.about, "   ".join(parts))
        self.about.setToolTip(plain_tip(self.about.text()[:400]))
        self.views.setEnabled(bool(preview))
        notes = [fault["sentence"] for fault in preview.get("faults", ())]
        if tokens is not None and tokens > limit:
            if kept := preview.get("kept"):
                what = "its end" if preview["is_label"] else "the beginning of its last user message"
                notes.append(f"Too long: {what} is cut off, leaving {kept:,} of {tokens:,} tokens.")
            else:
                notes.append(f"Too long by {tokens - limit:,}: training leaves this row out.")
        if preview.get("loading") and not notes:
            notes.append("The tokenizer is being loaded; until then these are the messages.")
        if not preview.get("has_template", True):
            notes.append("This model has no chat template: the messages are joined as plain text.")
        show_text(self.note, "\n".join(notes))

    def _draw(self) -> None:
        self.show_facts()
        self.pane.clear()
        if (preview := self._preview) is None:
            return
        colours = theme.palette()
        plain, muted, special = QTextCharFormat(), QTextCharFormat(), QTextCharFormat()
        for form, colour in ((plain, colours.text), (muted, colours.muted), (special, colours.accent)):
            form.setForeground(colour)
        special.setBackground(colours.selection)
        cursor = QTextCursor(self.pane.document())

        def write_sections(sections: Sequence[tuple[str, str]]) -> None:
            for i, (title, text) in enumerate(sections):
                cursor.insertText("\n\n" * bool(i) + title, muted)
                cursor.insertText(f"\n{text}", plain)

        cursor.beginEditBlock()
        view = self.views.key if preview["messages"] else "columns"  # a row that cannot be used shows its columns
        if view == "columns":
            write_sections([(cell["name"], cell["text"]) for cell in preview["cells"]])
        else:
            for i, piece in enumerate(preview["pieces"]):
                if view == "ids":
                    cursor.insertText(" " * bool(i), plain)
                text = piece["text"] if view == "prompt" else " ".join(map(str, piece["ids"]))
                cursor.insertText(text, muted if not piece["learnt"] else special if piece["special"] else plain)
            if view == "prompt" and preview["tokens"] is None:  # no tokenizer, or it is still being loaded
                write_sections([(message["role"], message["content"]) for message in preview["messages"]])
            shown = sum(len(piece["ids"]) for piece in preview["pieces"])
            missing = (preview.get("kept") or preview["tokens"] or 0) - shown
            if missing > 0:  # the service shortens a very long prompt
                cursor.insertText(f"\n… and {missing:,} more tokens", muted)
        cursor.endEditBlock()
        self.pane.moveCursor(QTextCursor.MoveOperation.Start)
