"""The table view of completions: bars under the scores, columns that fit, and sorting by a click on a header."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QRect, Qt, Signal
from PySide6.QtGui import QKeyEvent, QMouseEvent, QPainter, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QStyledItemDelegate, QStyleOptionViewItem

from app import theme
from app.theme import CELL_PADDING
from app.widgets.basic.tables import BaseTable
from app.widgets.completions.completion_model import BAR_ROLE, CompletionLine, CompletionModel, Index

_MIN_FIGURE_WIDTH, _MAX_FIGURE_WIDTH, _MIN_TEXT_WIDTH = 64, 124, 220
_LOGGED_TEXT_WIDTH = 112
"""Of a column of short texts that a function logged, such as “3 of 5”."""
_DOT_WIDTH = 18
"""Width of the dot in a header, with its gap."""
OPTIONAL_COLUMNS = 2
"""Columns at the end that a narrow table hides: tokens and stop reason, which the detail below the table has too."""


class ScoreBarDelegate(QStyledItemDelegate):
    """Paints a bar below each score, in its function's colour and as long as BAR_ROLE says."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(
            painter, option, index
        )  # text and selection first: painted later, a selection would cover the bar
        bar = index.data(BAR_ROLE)
        if bar is None:
            return
        length, colour = bar
        rect: QRect = option.rect  # pyright: ignore[reportAttributeAccessIssue]
        width = max(
            2, round((rect.width() - 2 * CELL_PADDING) * abs(length))
        )  # even the smallest score has a visible bar
        # Aligned with the right-aligned score. QRect.right() is the last pixel inside the cell, hence the + 1.
        painter.fillRect(QRect(rect.right() - CELL_PADDING - width + 1, rect.bottom() - 4, width, 2), colour)


class CompletionTable(BaseTable):
    """The table view over a CompletionModel.

    Signals:
        chosen(row of completions.jsonl, completion or None) – the current line changed.
        picked – the selected lines changed.
        sort_requested(str, bool) – sort by this column of the facts, descending or not; "" for the order of the file.
        touched – the user pressed a mouse button or a key in the table.
    """

    chosen = Signal(object, object)
    picked = Signal()
    sort_requested = Signal(str, bool)
    touched = Signal()

    def __init__(
        self, model: CompletionModel, max_score_width: int = _MAX_FIGURE_WIDTH, min_text_width: int = _MIN_TEXT_WIDTH
    ) -> None:
        """`max_score_width` limits a column of scores however wide its header is; the text gets at least
        `min_text_width`. Both in pixels before scaling with the text size."""
        super().__init__()
        self._completions = model
        self._max_score_width, self._min_text_width = theme.scaled(max_score_width), theme.scaled(min_text_width)
        self.setModel(model)
        self.setItemDelegate(ScoreBarDelegate(self))
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setAccessibleName("Completions")
        header = self.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        header.setMinimumSectionSize(48)
        header.setStretchLastSection(False)
        self._sorted = ("", True)
        self.selectionModel().currentRowChanged.connect(self._emit_chosen)
        self.selectionModel().selectionChanged.connect(lambda _new, _old: self.picked.emit())

    def allow_sorting(self) -> None:
        """Have a click on a header ask for sorting: from the largest down, from the smallest up, and as in the file again."""
        header = self.horizontalHeader()
        header.setSectionsClickable(True)
        header.sectionClicked.connect(self._turn_sorting)

    def show_sorting(self, key: str, *, descending: bool) -> None:
        """Mark the header of the column that the lines are sorted by; "" marks none."""
        self._sorted = (key, descending)
        columns = range(self._completions.columnCount()) if key else ()
        column = next((at for at in columns if self._completions.sort_key(at) == key), -1)
        order = Qt.SortOrder.DescendingOrder if descending else Qt.SortOrder.AscendingOrder
        self.horizontalHeader().setSortIndicatorShown(column >= 0)
        self.horizontalHeader().setSortIndicator(column, order)

    def _turn_sorting(self, column: int) -> None:
        key = self._completions.sort_key(column)
        if not key:
            return
        turns = {(key, True): (key, False), (key, False): ("", True)}
        self.sort_requested.emit(*turns.get(self._sorted, (key, True)))

    @property
    def current_line(self) -> CompletionLine | None:
        """The current line; None where there is none."""
        row = self.currentIndex().row()
        return self._completions.lines[row] if 0 <= row < self._completions.rowCount() else None

    @property
    def selected_lines(self) -> list[CompletionLine]:
        """The selected lines that are completions, from the top."""
        lines = [self._completions.lines[row] for row in self.selected_rows()]
        return [line for line in lines if line.completion is not None]

    def reset_view(self) -> None:
        """After `show_groups`: span the prompts over the scores, size the columns, select the first completion."""
        self.clearSpans()  # Qt keeps spans by row number, also through a model reset
        flat = self._completions.is_flat  # then there are no prompts, and a line is read from the file only to be shown
        for row, line in enumerate([] if flat else self._completions.lines):
            if line.completion is None and self._completions.rewards:
                self.setSpan(row, 0, 1, 1 + len(self._completions.rewards))
        self._resize_columns()
        first = next((row for row, line in enumerate(self._completions.lines) if line.completion is not None), None)
        if first is not None:
            self.selectRow(first)
        self.scrollToTop()  # selecting scrolled to the completion, and hid its prompt in the line above

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._resize_columns()

    # `touched` is emitted after the view has handled the event, when the current line is the new one already.

    def mousePressEvent(self, event: QMouseEvent) -> None:
        super().mousePressEvent(event)
        self.touched.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        super().keyPressEvent(event)
        self.touched.emit()

    def _resize_columns(self) -> None:
        """Size columns of figures by their headers; the text column gets the remaining width.

        In a narrow table the optional columns are hidden, and the text gets their width too.
        """
        widths = {column: self._figure_width(column) for column in range(1, self._completions.columnCount())}
        optional = list(widths)[-OPTIONAL_COLUMNS:]
        available = self.viewport().width()
        narrow = available - sum(widths.values()) < self._min_text_width
        for column, width in widths.items():
            self.setColumnWidth(column, width)
            self.setColumnHidden(column, narrow and column in optional)
        used = sum(width for column, width in widths.items() if not (narrow and column in optional))
        # Not a Stretch section: it would shrink to the minimum section size where the table should scroll sideways.
        self.setColumnWidth(0, max(self._min_text_width, available - used))

    def _figure_width(self, column: int) -> int:
        """Width of a column of figures: what the longer line of its header needs, within limits."""
        metrics = self.horizontalHeader().fontMetrics()
        lines = str(self._completions.headerData(column, Qt.Orientation.Horizontal)).split("\n")
        dot = theme.scaled(_DOT_WIDTH) if column <= len(self._completions.rewards) else 0
        needed = max(map(metrics.horizontalAdvance, lines)) + dot + 2 * CELL_PADDING + 2
        widest = self._max_score_width if dot else theme.scaled(_MAX_FIGURE_WIDTH)
        is_text = self._completions.is_text(column) and column < self._completions.columnCount() - OPTIONAL_COLUMNS
        least = theme.scaled(_LOGGED_TEXT_WIDTH if is_text else _MIN_FIGURE_WIDTH)
        return max(min(least, widest), min(widest, needed))

    def _emit_chosen(self, current: QModelIndex, _previous: QModelIndex) -> None:
        if current.isValid() and current.row() < len(self._completions.lines):
            line = self._completions.lines[current.row()]
            self.chosen.emit(line.row, line.completion)
