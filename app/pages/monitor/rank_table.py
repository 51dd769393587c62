"""The machines of a run as it trains, a row for each rank: speed, memory, waiting, and whether it was lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt
from PySide6.QtWidgets import QHeaderView, QWidget

from app import theme
from app.state.run_state import RankNow
from app.widgets.basic.labels import plain_tip
from app.widgets.basic.layout import set_shown
from app.widgets.basic.number_format import figure
from app.widgets.basic.tables import ROW_HEIGHT, BaseTable, alignment_of, header_data
from backend.trainer.health.rules import RULES

Index = QModelIndex | QPersistentModelIndex
MOST_ROWS = 4
"""Rows that are shown without scrolling: the charts need the room."""
WAITS_LONG = RULES["machines_wait"].threshold.value
"""Share of a step from which a rank's waiting stands out."""


@dataclass(frozen=True, slots=True)
class _RankColumn:
    title: str
    text: Callable[[RankNow], str]
    tip: str = ""
    is_figure: bool = True


def _memory(rank: RankNow) -> str:
    peak = figure(rank.memory_gb, "GB")
    return f"{peak} of {figure(rank.info.memory_gb, 'GB')}" if rank.info.memory_gb else peak


COLUMNS = (
    _RankColumn("Rank", lambda rank: str(rank.info.rank), "Rank 0 runs on this machine and writes the run folder"),
    _RankColumn("Machine", lambda rank: rank.info.machine, is_figure=False),
    _RankColumn("Chip", lambda rank: rank.info.chip, is_figure=False),
    _RankColumn("Sampling", lambda rank: figure(rank.sampling, "tokens/s"), "Tokens sampled in a second, of the newest step"),
    _RankColumn("Learning", lambda rank: figure(rank.learning, "tokens/s"), "Tokens learned from in a second, of the newest step"),
    _RankColumn("Prompts", lambda rank: figure(None if rank.prompts is None else round(rank.prompts)), "Prompts of the newest step that this rank has sampled"),
    _RankColumn("Peak memory", _memory, "The most memory in use at once, of all there is"),
    _RankColumn("Waiting", lambda rank: figure(rank.waiting_share, "share"), "Share of the newest step spent waiting for the others"),
    _RankColumn("State", lambda rank: "Lost" if rank.is_lost else "", "A machine that stopped answering, or whose process died, is lost", False),
)  # fmt: skip
_WIDTHS = (48, 0, 0, 118, 118, 64, 146, 72, 56)
"""Pixels before scaling; 0 shares what is left."""


class RankModel(QAbstractTableModel):
    """Attributes:
    rows – the ranks.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[RankNow] = []

    def show_ranks(self, ranks: Sequence[RankNow]) -> None:
        if len(ranks) != len(self.rows):
            self.beginResetModel()
            self.rows = list(ranks)
            self.endResetModel()
        elif list(ranks) != self.rows:
            self.rows = list(ranks)
            self.dataChanged.emit(self.index(0, 0), self.index(len(ranks) - 1, len(COLUMNS) - 1))

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(COLUMNS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        return header_data(COLUMNS[section], role) if orientation == Qt.Orientation.Horizontal else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        rank, column = self.rows[index.row()], COLUMNS[index.column()]
        if role == Qt.ItemDataRole.DisplayRole:
            return column.text(rank)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return alignment_of(column)
        if role == Qt.ItemDataRole.FontRole:
            return theme.figures_font()
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(_about(rank))
        return self._colour(rank, column) if role == Qt.ItemDataRole.ForegroundRole else None

    def _colour(self, rank: RankNow, column: _RankColumn) -> Any:
        colours = theme.palette()
        if rank.is_lost:
            return colours.bad if column.title in ("Machine", "State") else colours.muted
        waits_long = column.title == "Waiting" and (rank.waiting_share or 0) > WAITS_LONG
        return colours.warning if waits_long else colours.text


def _about(rank: RankNow) -> str:
    info = rank.info
    versions = ", ".join(f"{name} {number}" for name, number in (("mlx", info.mlx), ("Python", info.python)) if number)
    where = f"at {info.address}" if info.address else "this machine" if info.rank == 0 else ""
    return "\n".join(filter(None, [where, versions, f"What it prints: {info.log}" if info.log else ""]))


class RankTable(BaseTable):
    """Attributes:
    card – the table in its card, for the page; hidden for a run on one machine.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.ranks = RankModel(self)
        self.setModel(self.ranks)
        self.setAccessibleName("Machines of the run")
        header, modes = self.horizontalHeader(), QHeaderView.ResizeMode
        for number, width in enumerate(_WIDTHS):
            header.setSectionResizeMode(number, modes.Interactive if width else modes.Stretch)
            if width:
                self.setColumnWidth(number, theme.scaled(width))
        self.card = self.in_card()
        self.card.hide()

    def show_ranks(self, ranks: Sequence[RankNow]) -> None:
        """Show these, in a height that fits them; none hide the table."""
        self.ranks.show_ranks(ranks)
        set_shown(self.card, bool(ranks))
        shown = min(len(ranks), MOST_ROWS)
        self.setFixedHeight(self.horizontalHeader().sizeHint().height() + theme.scaled(ROW_HEIGHT) * shown + 4)
