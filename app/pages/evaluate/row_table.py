"""The rows of an evaluation: each prompt with its mean reward before and after, the largest changes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView

from app import theme
from app.widgets.basic.base_table import BaseTable
from app.widgets.basic.number_format import figure, signed
from app.widgets.completions.completion_model import advantage_colour, one_line
from backend.trainer.evaluation.evaluation_rows import SAME

Index = QModelIndex | QPersistentModelIndex
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
_HEADERS = ("Row", "Prompt", "Base", "Tuned", "Change")
_ROW, _PROMPT, _BEFORE, _AFTER, _CHANGE = range(5)
_WIDTHS = {_ROW: 48, _BEFORE: 62, _AFTER: 62, _CHANGE: 74}

Kind = Literal["all", "better", "worse", "unchanged"]


@dataclass(frozen=True, slots=True)
class RowLine:
    """A line: the place of its row among those that were read, its number in the split from 1, its text and its means."""

    place: int
    number: int
    prompt: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        if self.before is None or self.after is None:
            return None
        return 0.0 if abs(self.after - self.before) < SAME else self.after - self.before

    @property
    def kind(self) -> Kind | None:
        change = self.change
        return None if change is None else "better" if change > 0 else "worse" if change < 0 else "unchanged"


class PromptRowModel(QAbstractTableModel):
    """Attributes:
    lines – those of the chosen kind: better ones by the largest gain, worse ones by the largest loss, else in the split's order.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.lines: list[RowLine] = []
        self._all: Sequence[RowLine] = ()
        self._kind: Kind = "all"
        theme.signals.changed.connect(self._recolour)

    @property
    def has_both_sides(self) -> bool:
        return any(line.before is not None for line in self._all)

    def show_lines(self, lines: Sequence[RowLine], kind: Kind) -> None:
        self.beginResetModel()
        self._all, self._kind = lines, kind
        chosen = [line for line in lines if kind in ("all", line.kind)]
        if kind in ("better", "worse"):
            chosen.sort(key=lambda line: -abs(line.change or 0.0))
        self.lines = chosen
        self.endResetModel()

    def _recolour(self) -> None:
        if self.lines:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.lines) - 1, _CHANGE))

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.lines)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(_HEADERS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return _HEADERS[section] if self.has_both_sides or section != _AFTER else "Reward"
        if role == Qt.ItemDataRole.ToolTipRole and section in (_BEFORE, _AFTER):
            return "Mean reward of the prompt's completions."
        return (_LEFT if section == _PROMPT else _RIGHT) if role == Qt.ItemDataRole.TextAlignmentRole else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        line, column = self.lines[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            texts = (
                str(line.number),
                one_line(line.prompt),
                figure(line.before),
                figure(line.after),
                signed(line.change),
            )
            return texts[column]
        if role == Qt.ItemDataRole.ForegroundRole:
            if column == _CHANGE:
                return advantage_colour(line.change)
            return theme.palette().text if column in (_PROMPT, _AFTER) else theme.palette().muted
        if role == Qt.ItemDataRole.FontRole:
            return theme.mono_font() if column == _PROMPT else theme.figures_font()
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _LEFT if column == _PROMPT else _RIGHT
        return None


class PromptRowTable(BaseTable):
    """Signals:
    chosen(int) – the place of the row that is selected now; −1 for none.
    """

    chosen = Signal(int)

    def __init__(self, model: PromptRowModel) -> None:
        super().__init__()
        self._rows = model
        self.setModel(model)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setAccessibleName("Prompts")
        header = self.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        header.setSectionResizeMode(_PROMPT, QHeaderView.ResizeMode.Stretch)
        header.setMinimumSectionSize(40)
        self.selectionModel().currentRowChanged.connect(lambda current, _: self._emit_chosen(current))
        model.modelReset.connect(self._on_reset)

    def _on_reset(self) -> None:
        self._fit_columns()
        if self._rows.lines:
            self.selectRow(0)
        else:
            self.chosen.emit(-1)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_columns()

    def _fit_columns(self) -> None:
        for column, width in _WIDTHS.items():
            self.setColumnWidth(column, theme.scaled(width))
        for column in (_BEFORE, _CHANGE):
            self.setColumnHidden(column, not self._rows.has_both_sides)

    def _emit_chosen(self, current: QModelIndex) -> None:
        if current.isValid() and current.row() < len(self._rows.lines):
            self.chosen.emit(self._rows.lines[current.row()].place)
