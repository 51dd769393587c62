"""The list of machines as a table: name and address, which can be edited, and beside them what a check found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt, Signal
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QWidget

from app import theme
from app.state.memory_parts import amount
from app.widgets.basic.base_table import ROW_HEIGHT, BaseTable, alignment_of, header_data
from app.widgets.basic.labels_and_buttons import plain_tip
from app.widgets.basic.number_format import DASH
from backend.distributed.hosts_file import HERE, Host
from backend.distributed.machine_report import CheckedMachine, MachineFacts

Index = QModelIndex | QPersistentModelIndex
NAME, ADDRESS = 1, 2
MOST_ROWS = 8
"""Rows that are shown without scrolling."""


@dataclass(frozen=True, slots=True)
class MachineRow:
    """A row: the entry of the hosts file, what was found, and what is being done."""

    host: Host
    is_here: bool
    checked: CheckedMachine | None = None
    stage: str = ""


@dataclass(frozen=True, slots=True)
class _MachineColumn:
    title: str
    tip: str
    width: int
    text: Callable[[MachineFacts], str] = lambda facts: ""
    is_figure: bool = False


def _free_of(facts: MachineFacts) -> str:
    free, of_all = amount(facts.memory_free), amount(facts.memory)
    unit = of_all[-3:]  # said once where both have it
    return f"{free.removesuffix(unit)} of {of_all}"


COLUMNS = (
    _MachineColumn("Rank", "The number of the process; rank 0 runs here and writes the run folder", 44, is_figure=True),
    _MachineColumn("Name for ssh", "As you would type it after ssh. 127.0.0.1 is this machine. Double-click to edit.", 120),
    _MachineColumn("Address", "An IPv4 address at which the others reach it, such as that of the Thunderbolt bridge. Double-click to edit.", 88),
    _MachineColumn("State", "What the check is doing, or found", 100),
    _MachineColumn("Chip", "", 108, lambda facts: facts.chip),
    _MachineColumn("Memory free", "Free now, of all there is", 134, _free_of, True),
    _MachineColumn("Disk free", "Where models are kept", 78, lambda facts: DASH if facts.disk_free is None else amount(facts.disk_free), True),
    _MachineColumn("Model", "Whether the form's model is there", 52, lambda facts: "Yes" if facts.model else "No"),
)  # fmt: skip


class MachineModel(QAbstractTableModel):
    """Attributes:
        rows – the machines, in the order of their ranks.

    Signals:
        edited(rank, column, text) – the user typed a name or an address.
    """

    edited = Signal(int, int, str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[MachineRow] = []
        theme.signals.changed.connect(self._changed)

    def show_rows(self, rows: Sequence[MachineRow]) -> None:
        if len(rows) != len(self.rows):
            self.beginResetModel()
            self.rows = list(rows)
            self.endResetModel()
        elif rows != self.rows:  # an open editor stays open
            self.rows = list(rows)
            self._changed()

    def _changed(self) -> None:
        if self.rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.rows) - 1, len(COLUMNS) - 1))

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(COLUMNS)

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        is_editable = index.column() == ADDRESS or (index.column() == NAME and index.row() > 0)
        return flags | Qt.ItemFlag.ItemIsEditable if is_editable else flags

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        return header_data(COLUMNS[section], role) if orientation == Qt.Orientation.Horizontal else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], COLUMNS[index.column()]
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(row, index)
        if role == Qt.ItemDataRole.EditRole:
            return row.host.ssh if index.column() == NAME else ", ".join(row.host.ips)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return alignment_of(column)
        if role == Qt.ItemDataRole.FontRole:
            return theme.figures_font()
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(_about(row))
        return self._colour(row, column) if role == Qt.ItemDataRole.ForegroundRole else None

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        self.edited.emit(index.row(), index.column(), str(value))
        return True

    def _text(self, row: MachineRow, index: Index) -> str:
        column = index.column()
        if column == 0:
            return str(index.row())
        if column == NAME:
            return _name(row)
        if column == ADDRESS:
            return ", ".join(row.host.ips) or DASH
        if COLUMNS[column].title == "State":
            return _state(row)
        facts = row.checked.facts if row.checked is not None else None
        return (COLUMNS[column].text(facts) or DASH) if facts is not None else ""

    def _colour(self, row: MachineRow, column: _MachineColumn) -> Any:
        colours = theme.palette()
        if column.title == "State" and row.checked is not None and not row.stage:
            return colours.good if row.checked.facts is not None else colours.bad
        is_missing = column.title == "Name for ssh" and not row.host.ssh
        return colours.placeholder if is_missing else colours.text


def _name(row: MachineRow) -> str:
    if row.host.ssh in HERE:
        return "This machine"
    return f"{row.host.ssh} (here)" if row.is_here else row.host.ssh or "name it"


def _state(row: MachineRow) -> str:
    if row.stage:
        return row.stage
    if row.checked is None:
        return DASH
    return "Answered" if row.checked.facts is not None else "Not reached"


def _about(row: MachineRow) -> str:
    """The tool tip: everything that is known."""
    if row.checked is None:
        return ""
    if (facts := row.checked.facts) is None:
        return row.checked.problem
    lines = [facts.machine, facts.system, facts.chip, f"Memory: {_free_of(facts)}; a run may use {amount(facts.memory_usable)}",
             f"Python {facts.python}, mlx {facts.mlx}, mlx-lm {facts.mlx_lm}, GRPO Studio {facts.grpo_studio}"]  # fmt: skip
    return "\n".join(filter(None, lines))


class MachineTable(BaseTable):
    """Signals:
    edited(rank, column, text) – the user typed a name or an address.
    """

    edited = Signal(int, int, str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.machines = MachineModel(self)
        self.setModel(self.machines)
        self.machines.edited.connect(self.edited)
        self.setAccessibleName("Machines")
        triggers = QAbstractItemView.EditTrigger
        self.setEditTriggers(triggers.DoubleClicked | triggers.EditKeyPressed | triggers.AnyKeyPressed)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        header = self.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        header.setStretchLastSection(True)
        for number, column in enumerate(COLUMNS):
            self.setColumnWidth(number, theme.scaled(column.width))
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)

    def show_rows(self, rows: Sequence[MachineRow]) -> None:
        """Show these, in a height that fits them."""
        self.machines.show_rows(rows)
        shown = max(1, min(len(rows), MOST_ROWS))
        scroll_bar = self.horizontalScrollBar().sizeHint().height()
        self.setFixedHeight(
            self.horizontalHeader().sizeHint().height() + theme.scaled(ROW_HEIGHT) * shown + scroll_bar + 4
        )

    def edit_name(self, rank: int) -> None:
        """Begin to type a machine's name."""
        index = self.machines.index(rank, NAME)
        self.setCurrentIndex(index)
        self.edit(index)
