"""The test cases kept with a reward file: which pass, and for those that fail the actual and the expected scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QHeaderView

from app import theme
from app.widgets.basic.base_table import BaseTable
from app.widgets.basic.number_format import figure
from app.widgets.completions.cells import one_line

Index = QModelIndex | QPersistentModelIndex
HEADS = ("Result", "Completion", "Expected")


class CaseModel(QAbstractTableModel):
    """Cases as the bench has them: {"case", "given", "failures"}.

    Attributes:
        cases – in order.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.cases: list[Mapping[str, Any]] = []

    def show_cases(self, cases: Sequence[Mapping[str, Any]]) -> None:
        self.beginResetModel()
        self.cases = list(cases)
        self.endResetModel()

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.cases)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(HEADS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        return HEADS[section] if role == Qt.ItemDataRole.DisplayRole else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.cases[index.row()], index.column()
        failures = list(row["failures"])
        if role == Qt.ItemDataRole.DisplayRole:
            return ("fails" if failures else "passes", one_line(row["case"]["completion"]), _result_text(row))[column]
        if role == Qt.ItemDataRole.ForegroundRole:
            colours = theme.palette()
            return (colours.bad if failures else colours.good, colours.text, colours.muted)[column]
        if role == Qt.ItemDataRole.FontRole:
            return theme.mono_font() if column == 1 else theme.figures_font()
        if role == Qt.ItemDataRole.ToolTipRole:
            return "\n".join(failures) or _result_text(row)
        return None


class CaseTable(BaseTable):
    """The table view.

    Signals:
        drop_requested(index of a case) – Delete was pressed.
    """

    drop_requested = Signal(int)

    def __init__(self, model: CaseModel) -> None:
        super().__init__()
        self.setModel(model)
        self.setAccessibleName("Cases")
        self.setAccessibleDescription("Delete throws the chosen case away.")
        head = self.horizontalHeader()
        head.setSectionResizeMode(0, QHeaderView.ResizeMode.Fixed)
        self.setColumnWidth(0, theme.scaled(64))
        head.setSectionResizeMode(1, QHeaderView.ResizeMode.Stretch)
        head.setSectionResizeMode(2, QHeaderView.ResizeMode.Stretch)
        theme.signals.changed.connect(self.viewport().update)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Delete, Qt.Key.Key_Backspace):
            self.drop()
        else:
            super().keyPressEvent(event)

    def drop(self) -> None:
        """Request the removal of the current case."""
        if self.currentIndex().isValid():
            self.drop_requested.emit(self.currentIndex().row())


def _result_text(row: Mapping[str, Any]) -> str:
    """The failures of a case, or the expected scores if it passes."""
    if row["failures"]:
        return " ".join(row["failures"])
    return ", ".join(f"{name} {figure(score)}" for name, score in row["case"]["expected"].items())
