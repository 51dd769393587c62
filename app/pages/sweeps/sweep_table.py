"""The results of a sweep as a table: a row for each configuration, best first, with a bar for its value."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, QRectF, Qt
from PySide6.QtGui import QPainter, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app import theme
from app.widgets.basic.labels import plain_tip
from app.widgets.basic.number_format import DASH, figure
from app.widgets.basic.tables import BaseTable
from backend.config.config import SETTINGS
from backend.runs.sweeps.sweep import text_of
from backend.runs.sweeps.sweep_results import ConfigurationResult, MemberResult, SweepResults

Index = QModelIndex | QPersistentModelIndex
SHARE = Qt.ItemDataRole.UserRole
"""Of a cell with a bar: its length, 0 … 1."""
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
_LAST = ("", "± sd", "Seeds", "Step", "Completions", "State")
_WIDTHS = (120, 72, 62, 72, 104, 96)
STATE_ROLES = {"finished": "good", "training": "accent", "failed": "bad", "stopped": "warning"}
WINNER = "Best"


class SweepModel(QAbstractTableModel):
    """Attributes:
    rows – the configurations in the order shown.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.results: SweepResults | None = None
        self.rows: list[ConfigurationResult] = []
        self._varied: list[str] = []
        theme.signals.changed.connect(self._recolour)

    def set_results(self, results: SweepResults | None) -> None:
        """Show these; the columns follow from the settings that vary."""
        self.beginResetModel()
        self.results = results
        self.rows = results.ranked if results is not None else []
        self._varied = list(self.rows[0].settings) if self.rows else []
        self.endResetModel()

    def _recolour(self) -> None:
        if self.rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.rows) - 1, self.columnCount() - 1))

    @property
    def first_figure(self) -> int:
        """The column of the bar, after the number and the settings."""
        return 1 + len(self._varied)

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() or not self.rows else self.first_figure + len(_LAST)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _LEFT if section <= self.first_figure or section == self.columnCount() - 1 else _RIGHT
        if role != Qt.ItemDataRole.DisplayRole:
            return None
        if section == 0:
            return "No."
        if section < self.first_figure:
            return SETTINGS[self._varied[section - 1]].label
        metric = self.results.metric if self.results is not None else ""
        return _LAST[section - self.first_figure] or f"Held-out {metric}"

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(row, column)
        if role == SHARE and column == self.first_figure:
            return self._share(row)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return self.headerData(column, Qt.Orientation.Horizontal, role)
        if role == Qt.ItemDataRole.FontRole:
            return theme.figures_font()
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip("\n".join(_line(run) for run in row.runs))
        return self._colour(row, column) if role == Qt.ItemDataRole.ForegroundRole else None

    def _text(self, row: ConfigurationResult, column: int) -> str:
        if column == 0:
            return str(row.number)
        if column < self.first_figure:
            return text_of(row.settings[self._varied[column - 1]])
        of_seeds = f"{sum(run.value is not None for run in row.runs)} of {len(row.runs)}"
        cells = (figure(row.value), figure(row.sd), of_seeds, f"{row.step:,}", f"{row.completions:,}", self._state(row))
        return cells[column - self.first_figure]

    def _state(self, row: ConfigurationResult) -> str:
        winner = self.results.winner if self.results is not None else None
        return WINNER if winner is not None and winner.number == row.number else row.state.capitalize()

    def _share(self, row: ConfigurationResult) -> float | None:
        """Between the lowest value and the highest; the lowest keeps a little, to be seen."""
        values = [each.value for each in self.rows if each.value is not None]
        if row.value is None or not values:
            return None
        span = max(values) - min(values)
        return 1.0 if span == 0 else 0.04 + 0.96 * (row.value - min(values)) / span

    def _colour(self, row: ConfigurationResult, column: int) -> Any:
        colours = theme.palette()
        if column == self.columnCount() - 1:
            return getattr(colours, STATE_ROLES.get(row.state, "muted"))
        given_up = row.state == "given up"
        return colours.muted if given_up or column > self.first_figure or column == 0 else colours.text


def _line(run: MemberResult) -> str:
    return f"{run.run}: {run.state}, step {run.step:,}, {figure(run.value) if run.value is not None else DASH}. {run.sentence}"


class _Bar(QStyledItemDelegate):
    """A cell's figure, and a bar below it."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, option, index)
        share = index.data(SHARE)
        if share is None:
            return
        area: Any = option.rect  # pyright: ignore[reportAttributeAccessIssue]
        height, left = 3, area.left() + 8
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(theme.palette().accent)
        length = max(2.0, share * (area.width() - 16))
        painter.drawRoundedRect(QRectF(left, area.bottom() - height - 1, length, height), 1.5, 1.5)
        painter.restore()


class SweepTable(BaseTable):
    """The view. `activated` is emitted on a double click and on Enter."""

    def __init__(self, model: SweepModel, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._configurations = model
        self.setModel(model)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setAccessibleName("Configurations of the sweep")
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        self._bar = _Bar(self)

    def show_results(self, results: SweepResults | None) -> None:
        """Replace the rows; the selected configuration stays selected."""
        chosen = self.selected_configuration()
        self._configurations.set_results(results)
        for column in range(self._configurations.columnCount()):
            self.setItemDelegateForColumn(column, self._bar if column == self._configurations.first_figure else None)  # pyright: ignore
        self._fit()
        numbers = [row.number for row in self._configurations.rows]
        if numbers:
            self.selectRow(numbers.index(chosen.number) if chosen is not None and chosen.number in numbers else 0)

    def selected_configuration(self) -> ConfigurationResult | None:
        rows = self.selected_rows()
        known = self._configurations.rows
        return known[rows[0]] if rows and rows[0] < len(known) else None

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        """Figures have their widths, and the settings share the rest."""
        first, columns = self._configurations.first_figure, self._configurations.columnCount()
        if not columns:
            return
        self.setColumnWidth(0, theme.scaled(44))
        for column, width in enumerate(_WIDTHS, first):
            self.setColumnWidth(column, theme.scaled(width))
        rest = self.viewport().width() - theme.scaled(44) - sum(map(theme.scaled, _WIDTHS))
        for column in range(1, first):
            self.setColumnWidth(column, max(theme.scaled(88), rest // (first - 1)))
