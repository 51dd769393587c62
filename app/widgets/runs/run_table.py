"""The archive of runs as a table: a row for each run, sorted by any column, filtered by text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, QSortFilterProxyModel, Qt
from PySide6.QtGui import QColor, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView

from app import theme
from app.widgets.basic.base_table import BaseTable
from app.widgets.basic.number_format import DASH, duration, figure, moment, signed
from app.widgets.runs.state_chip import STATE_LABELS, STATE_ROLES

Index = QModelIndex | QPersistentModelIndex
SORT = Qt.ItemDataRole.UserRole
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter


@dataclass(frozen=True, slots=True)
class RunRow:
    """What the table shows of a run; unknown values are None. `began` in unix seconds, `worked_s` without pauses."""

    path: Path
    state: str
    model: str
    step: int
    iterations: int | None
    reward: float | None
    change: float | None
    began: float | None
    worked_s: float | None


@dataclass(frozen=True, slots=True)
class _RunColumn:
    """A column: its header, the text and the sort key of a row, its width, alignment and tool tip."""

    head: str
    text: Callable[[RunRow], str]
    key: Callable[[RunRow], Any]
    width: int
    right: bool = False
    help: str = ""


_COLUMNS = (
    _RunColumn("Run", lambda row: row.path.name, lambda row: row.path.name.lower(), 0),
    _RunColumn("State", lambda row: STATE_LABELS[row.state], lambda row: row.state, 84),
    _RunColumn("Model", lambda row: "/".join(Path(row.model).parts[-2:]) or DASH, lambda row: row.model.lower(), 150),
    _RunColumn("Steps", lambda row: _steps(row), lambda row: row.step, 92, True),
    _RunColumn("Reward", lambda row: figure(row.reward), lambda row: _number(row.reward), 76, True, "Mean over the last steps."),
    _RunColumn("Change", lambda row: signed(row.change), lambda row: _number(row.change), 88, True,
            "Against the mean over the first steps."),
    _RunColumn("Began", lambda row: moment(row.began), lambda row: _number(row.began), 116, True),
    _RunColumn("Worked", lambda row: duration(row.worked_s), lambda row: _number(row.worked_s), 92, True,
            "Without loading and pauses."),
)  # fmt: skip
_STATE, _CHANGE = 1, 5
_OPTIONAL = (2, 7)
"""Columns that a narrow table hides: Model and Worked."""
NARROW, _MIN_NAME_WIDTH = 820, 160


class RunModel(QAbstractTableModel):
    """Runs as rows. `set_row` replaces a row in place, so that the selection and the scroll position survive.

    Attributes:
        rows – unsorted; the view sorts.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[RunRow] = []
        theme.signals.changed.connect(self._recolour)

    def set_paths(self, paths: Sequence[Path]) -> None:
        """Remove the runs that are not among `paths`. New ones come with `set_row`."""
        for i in reversed(range(len(self.rows))):
            if self.rows[i].path not in paths:
                self.beginRemoveRows(QModelIndex(), i, i)
                del self.rows[i]
                self.endRemoveRows()

    def set_row(self, row: RunRow) -> None:
        """Replace the row of the same run, or add it."""
        i = next((i for i, old in enumerate(self.rows) if old.path == row.path), None)
        if i is None:
            self.beginInsertRows(QModelIndex(), len(self.rows), len(self.rows))
            self.rows.append(row)
            self.endInsertRows()
        elif self.rows[i] != row:
            self.rows[i] = row
            self.dataChanged.emit(self.index(i, 0), self.index(i, len(_COLUMNS) - 1))

    def _recolour(self) -> None:
        if self.rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.rows) - 1, len(_COLUMNS) - 1))

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(_COLUMNS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        column = _COLUMNS[section]
        return {
            Qt.ItemDataRole.DisplayRole: column.head,
            Qt.ItemDataRole.ToolTipRole: column.help or None,
            Qt.ItemDataRole.TextAlignmentRole: _RIGHT if column.right else _LEFT,
        }.get(Qt.ItemDataRole(role))

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, number = self.rows[index.row()], index.column()
        column = _COLUMNS[number]
        if role == Qt.ItemDataRole.DisplayRole:
            return column.text(row)
        if role == SORT:
            return column.key(row)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _RIGHT if column.right else _LEFT
        if role == Qt.ItemDataRole.FontRole:
            return theme.figures_font()
        if role == Qt.ItemDataRole.ToolTipRole and number in (0, 2):
            return str(row.path) if number == 0 else row.model
        return _colour(row, number) if role == Qt.ItemDataRole.ForegroundRole else None


class RunTable(BaseTable):
    """The table view, through a proxy model that sorts and filters; newest first at the start.

    Attributes:
        sorted – the proxy model.

    Qt's own signal `activated` is emitted on a double click and on Enter.
    """

    def __init__(self, model: RunModel) -> None:
        super().__init__()
        self._rows = model
        self.sorted = QSortFilterProxyModel(self, sortRole=SORT, filterKeyColumn=-1)
        self.sorted.setFilterCaseSensitivity(Qt.CaseSensitivity.CaseInsensitive)
        self.sorted.setSourceModel(model)
        self.setModel(self.sorted)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setSortingEnabled(True)
        self.sortByColumn(6, Qt.SortOrder.DescendingOrder)
        self.setAccessibleName("Runs")
        head = self.horizontalHeader()
        head.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        head.setMinimumSectionSize(64)
        for index, column in enumerate(_COLUMNS[1:], 1):
            self.setColumnWidth(index, theme.scaled(column.width))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        width = self.viewport().width()
        for column in _OPTIONAL:
            self.setColumnHidden(column, width < theme.scaled(NARROW))
        used = sum(self.columnWidth(column) for column in range(1, len(_COLUMNS)) if not self.isColumnHidden(column))
        self.setColumnWidth(0, max(theme.scaled(_MIN_NAME_WIDTH), width - used))

    def selected_run(self) -> RunRow | None:
        """The selected run, if any."""
        rows = self.selected_rows()
        return self._rows.rows[self.sorted.mapToSource(self.sorted.index(rows[0], 0)).row()] if rows else None

    def choose(self, path: Path) -> None:
        """Select the run in this folder, if the table has it."""
        for row in range(self.sorted.rowCount()):
            if self._rows.rows[self.sorted.mapToSource(self.sorted.index(row, 0)).row()].path == path:
                self.selectRow(row)


def _steps(row: RunRow) -> str:
    return f"{row.step:,} of {row.iterations:,}" if row.iterations else f"{row.step:,}"


def _number(value: float | None) -> float:
    """A sort key: runs without the value come last in descending order."""
    return float("-inf") if value is None else value


def _colour(row: RunRow, column: int) -> QColor:
    colours = theme.palette()
    if column == _STATE:
        return getattr(colours, STATE_ROLES[row.state])
    if column == _CHANGE and row.change:
        return colours.advantage_above if row.change > 0 else colours.advantage_below
    return colours.text if column in (0, 4) else colours.muted
