"""A table model whose rows are dragged to another place within it."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QAbstractTableModel, QMimeData, QModelIndex, QPersistentModelIndex, Qt


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
