"""The base class of our tables: plain headers, rows of one height, no grid, copying with the standard shortcut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from PySide6.QtCore import QAbstractTableModel, QItemSelectionModel, QMimeData, QModelIndex, QPersistentModelIndex, Qt
from PySide6.QtGui import QGuiApplication, QKeyEvent, QKeySequence
from PySide6.QtWidgets import QAbstractItemView, QFrame, QTableView, QWidget

from app import theme
from app.widgets.basic.layout import wrap_in_card

ROW_HEIGHT = 28


class TableColumn(Protocol):
    """A column of a table: its header, what the header's tip says, and whether it holds figures, which stand on the right."""

    @property
    def title(self) -> str: ...
    @property
    def tip(self) -> str: ...
    @property
    def is_figure(self) -> bool: ...


def alignment_of(column: TableColumn) -> Qt.AlignmentFlag:
    side = Qt.AlignmentFlag.AlignRight if column.is_figure else Qt.AlignmentFlag.AlignLeft
    return side | Qt.AlignmentFlag.AlignVCenter


def header_data(column: TableColumn, role: int) -> Any:
    """What a model's `headerData` answers for a column."""
    if role == Qt.ItemDataRole.TextAlignmentRole:
        return alignment_of(column)
    if role == Qt.ItemDataRole.ToolTipRole:
        return column.tip or None
    return column.title if role == Qt.ItemDataRole.DisplayRole else None


class BaseTable(QTableView):
    """A table view whose selected rows are copied as tab-separated text, headers first."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setTabKeyNavigation(False)
        self.setProperty("role", "table")
        self.verticalHeader().hide()
        self.verticalHeader().setDefaultSectionSize(theme.scaled(ROW_HEIGHT))
        self.horizontalHeader().setHighlightSections(False)
        self.horizontalHeader().setFont(theme.caption_font())

    def in_card(self) -> QFrame:
        """The table in a card of its own."""
        return wrap_in_card(self)

    def selected_rows(self) -> list[int]:
        """Row numbers of the selection, ascending."""
        return sorted(index.row() for index in self.selectionModel().selectedRows()) if self.selectionModel() else []

    def selectRow(self, row: int) -> None:
        """Select this row: alone, or with the others where the table is in multi-selection.

        Qt's own takes the keys that are held down into account: while a shortcut that opens a page is, nothing or a range is selected.
        """
        flags, modes = QItemSelectionModel.SelectionFlag, QAbstractItemView.SelectionMode
        command = flags.Select if self.selectionMode() == modes.MultiSelection else flags.ClearAndSelect
        column = max(
            self.horizontalHeader().logicalIndexAt(0), 0
        )  # the leftmost in view, so that nothing is scrolled sideways
        self.selectionModel().setCurrentIndex(self.model().index(row, column), command | flags.Rows)

    def as_text(self, rows: list[int]) -> str:
        """These rows as tab-separated text with a header line; each cell is its display text."""
        model, columns = self.model(), range(self.model().columnCount())
        header = [_single_line(model.headerData(column, Qt.Orientation.Horizontal)) for column in columns]
        lines = [[self._cell_text(model.index(row, column)) for column in columns] for row in rows]
        return "\n".join("\t".join(cells) for cells in [header, *lines])

    def copy(self) -> None:
        """Put the selected rows on the clipboard."""
        QGuiApplication.clipboard().setText(self.as_text(self.selected_rows()))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.currentIndex().isValid():
            # Qt leaves it to the platform whether Enter activates: on macOS it starts editing.
            self.activated.emit(self.currentIndex())
        else:
            super().keyPressEvent(event)

    @staticmethod
    def _cell_text(index: QModelIndex) -> str:
        check_state = index.data(Qt.ItemDataRole.CheckStateRole)
        if check_state is not None:
            return "yes" if check_state == Qt.CheckState.Checked else "no"
        return _single_line(index.data())


def _single_line(value: object) -> str:
    """`value` as text on one line with single spaces: a tab or a newline would break the table apart where it is pasted."""
    return " ".join(str(value or "").split())


class DraggedRowsModel(QAbstractTableModel):
    """`DRAG_TYPE` is the MIME type under which a row's number travels: rows of other tables are refused by it."""

    DRAG_TYPE = ""

    def drop_row(self, origin: int, target: int) -> None:
        """Row `origin` was dropped before row `target`, or behind the last one."""
        raise NotImplementedError

    def supportedDropActions(self) -> Qt.DropAction:
        return Qt.DropAction.MoveAction

    def mimeTypes(self) -> list[str]:
        return [self.DRAG_TYPE]

    def mimeData(self, indexes: Sequence[QModelIndex]) -> QMimeData:
        data = QMimeData()
        data.setData(self.DRAG_TYPE, str(indexes[0].row()).encode())
        return data

    def dropMimeData(
        self, data: QMimeData, action: Qt.DropAction, row: int, column: int, parent: QModelIndex | QPersistentModelIndex
    ) -> bool:
        if not data.hasFormat(self.DRAG_TYPE):
            return False
        target = row if row >= 0 else parent.row() if parent.isValid() else self.rowCount()
        self.drop_row(int(bytes(data.data(self.DRAG_TYPE).data())), target)
        return False  # on True the view would delete the row that was dragged
