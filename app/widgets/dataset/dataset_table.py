"""The rows of a dataset as a table that holds only what has been looked at: parts are asked for as they come into view."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt, QTimer, Signal
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QWidget

from app import theme
from app.stylesheet import CELL_PADDING
from app.widgets.basic.base_table import BaseTable

Index = QModelIndex | QPersistentModelIndex
CHUNK = 100
"""Rows that are asked for at once: more than a screen of them."""
MAX_REQUESTS = 2
"""Parts that are asked for at a time: a view lies across two at most, and while it flies on, those passed are not wanted."""
MAX_CHUNKS = 60
"""Parts that are kept; those looked at longest ago go first."""
PLACEHOLDER = "…"
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
WIDE_LEAST, LEAST, MOST = 160, 56, 200
"""Pixels that a long prompt gets in a narrow table, which then scrolls sideways; the fewest and, in a narrow table, the most
that another column gets."""
MEASURED_ROWS, MEASURED_CHARS = 30, 200
"""Rows that decide how wide a column should be, and the characters of each that are measured."""
ROW, TOKENS, FIRST = 0, 1, 2
"""Columns: the row's number, the tokens of its prompt, then the dataset's own."""


@dataclass(frozen=True, slots=True)
class ColumnHeading:
    """A column of the dataset: its name, what it serves as ("" where it is not used), whether it holds numbers, and whether
    it is the one that gets the room that is left."""

    name: str
    use: str = ""
    right: bool = False
    wide: bool = False


class RowModel(QAbstractTableModel):
    """Signals: wanted(first row of a part) – rows came into view that are not here; they are handed in with `add_chunk`."""

    chunk_requested = Signal(int)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.headings: list[ColumnHeading] = []
        self._count = self._prompt_limit = 0
        self._parts: OrderedDict[int, tuple[Sequence[Mapping[str, str]], Sequence[int | None]]] = OrderedDict()
        self._missing: list[int] = []
        self._asked: set[int] = set()
        # Asked once the view has drawn: of a flight through the whole table only the part where it ends is wanted.
        self._soon = QTimer(self, singleShot=True, interval=20)
        self._soon.timeout.connect(self._ask)
        theme.signals.changed.connect(self._repaint)

    def show_rows(self, count: int, headings: Sequence[ColumnHeading], prompt_limit: int) -> None:
        """Begin anew, with nothing fetched yet. `prompt_limit` is how many tokens a prompt may have."""
        self.beginResetModel()
        self.headings, self._count, self._prompt_limit = list(headings), count, prompt_limit
        self._parts.clear()
        self._asked.clear()
        self._missing.clear()
        self.endResetModel()

    def set_prompt_limit(self, prompt_limit: int) -> None:
        self._prompt_limit = prompt_limit
        self._repaint()

    def forget(self) -> None:
        """Ask again for what is in view: more is known of it now. What stands there stays until the answer comes."""
        for part in list(self._parts)[:-MAX_REQUESTS]:
            del self._parts[part]
        for part in self._parts:
            self._want(part)

    def add_chunk(self, start: int, rows: Sequence[Mapping[str, str]], tokens: Sequence[int | None]) -> None:
        """A part that was wanted."""
        self._asked.discard(start)
        self._parts[start] = (rows, tokens)
        self._parts.move_to_end(start)
        while len(self._parts) > MAX_CHUNKS:
            self._parts.popitem(last=False)
        if self._count:
            last = min(start + CHUNK, self._count) - 1
            self.dataChanged.emit(self.index(start, 0), self.index(last, self.columnCount() - 1))
        self._ask()

    def release(self, start: int) -> None:
        """A part that was wanted, and will not come; it is asked for again when it is looked at again."""
        self._asked.discard(start)
        self._ask()

    def _want(self, start: int) -> None:
        """Note a part that is looked at. The timer is not started anew: a view that keeps moving would never be served."""
        self._missing = [*(one for one in self._missing if one != start), start][-MAX_REQUESTS:]
        if not self._soon.isActive():
            self._soon.start()

    def _ask(self) -> None:
        while self._missing and len(self._asked) < MAX_REQUESTS:
            start = self._missing.pop()
            if start not in self._asked:
                self._asked.add(start)
                self.chunk_requested.emit(start)

    def _found(self, row: int) -> tuple[Mapping[str, str], int | None] | None:
        start = row - row % CHUNK
        part = self._parts.get(start)
        if part is None:
            if start not in self._asked:
                self._want(start)
            return None
        self._parts.move_to_end(start)
        rows, tokens = part
        return (rows[row - start], tokens[row - start]) if row - start < len(rows) else ({}, None)

    def _repaint(self) -> None:
        if self._count:
            self.dataChanged.emit(self.index(0, 0), self.index(self._count - 1, self.columnCount() - 1))

    # What the view asks

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
        """What a cell of the dataset's own columns holds, where it is here; nothing is asked for."""
        part = self._parts.get(row - row % CHUNK)
        rows = part[0] if part else ()
        return rows[row % CHUNK].get(self.headings[column - FIRST].name, "") if row % CHUNK < len(rows) else ""

    def _text(self, row: int, column: int) -> str:
        if column == ROW:
            return f"{row + 1:,}"
        found = self._found(row)
        if found is None:
            return PLACEHOLDER
        cells, tokens = found
        if column == TOKENS:
            return f"{tokens:,}" if tokens is not None else ""
        return " ".join(cells.get(self.headings[column - FIRST].name, "").split())

    def _colour(self, row: int, column: int) -> Any:
        colours = theme.palette()
        if column == TOKENS:
            found = self._parts.get(row - row % CHUNK)
            length = found[1][row % CHUNK] if found and row % CHUNK < len(found[1]) else None
            return colours.warning if length is not None and length > self._prompt_limit else colours.muted
        return colours.text if column >= FIRST and self.headings[column - FIRST].use else colours.muted


class RowTable(BaseTable):
    """Signals: chosen(row) – it is the current one now; selected – other rows are selected than before."""

    chosen = Signal(int)
    selected = Signal()

    def __init__(self, model: RowModel) -> None:
        super().__init__()
        self._rows, self._instead = model, ""
        self.setModel(model)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setAccessibleName("Rows of the dataset")
        self.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.setCornerWidget(QWidget())  # else a square of another colour stands between the scroll bars
        head = self.horizontalHeader()
        head.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        head.setMinimumSectionSize(48)
        self.selectionModel().currentRowChanged.connect(lambda now, _: now.isValid() and self.chosen.emit(now.row()))
        self.selectionModel().selectionChanged.connect(lambda *_: self.selected.emit())
        model.dataChanged.connect(self._on_rows)

    def reset_view(self, instead: str = "") -> None:
        """After other rows are shown: columns to fit, the first row chosen; `instead` stands where there is none."""
        self.say(instead)
        self._fit()
        if self._rows.rowCount():
            self.selectRow(0)

    def selected_ranges(self) -> list[range]:
        """The selected rows, from the top, as they lie together: all of a large dataset are one range, and no list."""
        parts: Any = self.selectionModel().selection()
        return sorted((range(part.top(), part.bottom() + 1) for part in parts), key=lambda part: part.start)

    def say(self, instead: str) -> None:
        """What stands where there are no rows."""
        if instead != self._instead:
            self._instead = instead
            self.setAccessibleDescription(instead)
            self.viewport().update()

    def resizeEvent(self, event: Any) -> None:
        super().resizeEvent(event)
        self._fit()

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if self._instead and not self._rows.rowCount():
            painter = QPainter(self.viewport())
            painter.setPen(theme.palette().muted)
            painter.setFont(theme.body_font())
            words = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
            painter.drawText(self.viewport().rect().adjusted(24, 8, -24, -8), words, self._instead)

    def _on_rows(self, first: QModelIndex, _last: QModelIndex) -> None:
        """The first rows have come, and what they hold decides about the widths."""
        if first.row() == 0:
            self._fit()

    def _fit(self) -> None:
        """Figures as wide as they are, other columns as their heading and their first rows want, within bounds; the prompt
        gets what is left, and not too little."""
        headings = self._rows.headings
        if not headings:
            return
        digits = self.fontMetrics().horizontalAdvance(f"{self._rows.rowCount():,}") + 2 * CELL_PADDING + 6
        self.setColumnWidth(ROW, max(theme.scaled(52), digits))
        tokens = theme.scaled(68)
        self.setColumnWidth(TOKENS, tokens)
        widths = {place: self._width(place) for place in range(FIRST, FIRST + len(headings))}
        wide = next((place for place in widths if headings[place - FIRST].wide), FIRST)
        others = sum(width for place, width in widths.items() if place != wide)
        least = min(theme.scaled(WIDE_LEAST), widths[wide])
        widths[wide] = max(least, self.viewport().width() - self.columnWidth(ROW) - tokens - others)
        for place, width in widths.items():
            self.setColumnWidth(place, width)

    def _width(self, place: int) -> int:
        heading = str(self._rows.headerData(place, Qt.Orientation.Horizontal))
        words = self.horizontalHeader().fontMetrics().horizontalAdvance(heading)
        texts = (self._rows.text_of(row, place)[:MEASURED_CHARS] for row in range(MEASURED_ROWS))
        held = max(map(self.fontMetrics().horizontalAdvance, texts))
        least, most = theme.scaled(LEAST), max(theme.scaled(MOST), self.viewport().width() // 4)
        return max(least, min(most, max(words, held) + 2 * CELL_PADDING + 10))
