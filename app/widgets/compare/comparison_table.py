"""A read-only table of texts, such as the settings that differ between runs."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QWidget

from app import theme
from app.widgets.basic.base_table import BaseTable
from app.widgets.basic.labels_and_buttons import plain_tip

_WIDEST = 260
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter


class ComparisonTable(BaseTable):
    """The first row of a table is its header, its first column names the rows."""

    def __init__(self, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(name)
        self.table: list[list[str]] = []
        self._cells = QStandardItemModel(self)
        self.setModel(self._cells)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        self.horizontalHeader().setDefaultAlignment(_LEFT)
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Interactive)

    def show_table(self, table: Sequence[Sequence[str]]) -> None:
        """Show these rows; where only texts have changed, selection and scroll position stay."""
        rows = [list(row) for row in table]
        if rows == self.table:
            return
        is_same_shape = [len(row) for row in rows] == [len(row) for row in self.table]
        self.table = rows
        if is_same_shape:
            for i, row in enumerate(rows[1:]):
                for j, text in enumerate(row):
                    self._cells.item(i, j).setText(text)
        else:
            self._cells.clear()
            for row in rows[1:]:
                self._cells.appendRow([_cell(text) for text in row])
        self._cells.setHorizontalHeaderLabels(rows[0])
        self.resizeColumnsToContents()
        for column in range(self._cells.columnCount()):
            self.setColumnWidth(column, min(self.columnWidth(column) + theme.SPACE, theme.scaled(_WIDEST)))


def _cell(text: str) -> QStandardItem:
    item = QStandardItem(text)
    item.setFont(theme.figures_font())
    item.setToolTip(plain_tip(text))
    return item
