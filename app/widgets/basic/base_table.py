"""What our tables share: quiet headers, rows of one height, no grid, and copying with the usual keys."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QModelIndex, Qt
from PySide6.QtGui import QGuiApplication, QKeyEvent, QKeySequence
from PySide6.QtWidgets import QAbstractItemView, QFrame, QTableView, QWidget

from app import theme
from app.widgets.basic.layout import wrap_in_card

ROW_HEIGHT = 28


class BaseTable(QTableView):
    """A table whose selected rows can be copied as tab-separated text, headers first."""

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
        """Rows of the model that are selected, from the top."""
        return sorted(index.row() for index in self.selectionModel().selectedRows()) if self.selectionModel() else []

    def as_text(self, rows: list[int]) -> str:
        """These rows as tab-separated text with the headers; what a cell shows is what is copied."""
        model, columns = self.model(), range(self.model().columnCount())
        head = [_single_line(model.headerData(column, Qt.Orientation.Horizontal)) for column in columns]
        lines = [[self._text(model.index(row, column)) for column in columns] for row in rows]
        return "\n".join("\t".join(cells) for cells in [head, *lines])

    def copy(self) -> None:
        """Put the selected rows on the clipboard."""
        QGuiApplication.clipboard().setText(self.as_text(self.selected_rows()))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.currentIndex().isValid():
            self.activated.emit(self.currentIndex())
        else:
            super().keyPressEvent(event)

    @staticmethod
    def _text(index: QModelIndex) -> str:
        ticked = index.data(Qt.ItemDataRole.CheckStateRole)
        if ticked is not None:
            return "yes" if ticked == Qt.CheckState.Checked else "no"
        return _single_line(index.data())


def _single_line(told: Any) -> str:
    """On one line, with single spaces."""
    return " ".join(str(told or "").split())
