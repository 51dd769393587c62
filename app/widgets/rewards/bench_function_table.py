"""The reward functions on the bench: for each a histogram of its scores, their mean, its weight, its time, or its error.

The input is rows as the bench has them; a function's index decides its colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, QRect, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QPainter
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app import theme
from app.stylesheet import CELL_PADDING
from app.widgets.basic.base_table import ROW_HEIGHT, BaseTable
from app.widgets.basic.number_format import DASH, THIN, figure
from app.widgets.completions.cells import reward_dot
from app.widgets.form.value_text import number_text
from app.widgets.rewards.reward_delegates import WeightDelegate

Index = QModelIndex | QPersistentModelIndex
HEADS = ("Reward", "Scores", "Mean", "Weight", "Time")
REWARD, SCORES, MEAN, WEIGHT, TIME = range(5)
HISTOGRAM_ROLE = Qt.ItemDataRole.UserRole
"""Item role of the Scores column: (scores, colour)."""
BINS, MAX_BAR_WIDTH = 24, 16
"""Bars of a histogram, and the largest width of one in pixels."""
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter


class BenchFunctionModel(QAbstractTableModel):
    """Functions as rows.

    Attributes:
        rows – the functions, in order.

    Signals:
        weighed(all weights) – the user changed a weight.
    """

    weighed = Signal(list)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[Mapping[str, Any]] = []
        self._scores: dict[str, list[float]] = {}
        theme.signals.changed.connect(self._recolour)

    def show_functions(self, functions: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        self.beginResetModel()
        self.rows = list(functions)
        scores = [completion.get("rewards") or {} for group in groups for completion in group["completions"]]
        names = [function["name"] for function in functions]
        self._scores = {name: [row[name] for row in scores if row.get(name) is not None] for name in names}
        self.endResetModel()

    def _recolour(self) -> None:
        if self.rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.rows) - 1, len(HEADS) - 1))

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(HEADS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return HEADS[section]
        return (_RIGHT if section > SCORES else _LEFT) if role == Qt.ItemDataRole.TextAlignmentRole else None

    def flags(self, index: Index) -> Qt.ItemFlag:
        usual = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        return usual | Qt.ItemFlag.ItemIsEditable if index.column() == WEIGHT else usual

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        if index.column() != WEIGHT or role != Qt.ItemDataRole.EditRole:
            return False
        self.rows[index.row()] = {**self.rows[index.row()], "weight": float(value)}
        self.dataChanged.emit(index, index)
        self.weighed.emit([float(row["weight"]) for row in self.rows])
        return True

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], index.column()
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return self._text(row, column)
            case Qt.ItemDataRole.EditRole if column == WEIGHT:
                return float(row["weight"])
            case Qt.ItemDataRole.DecorationRole if column == REWARD:
                return reward_dot(index.row())
            case Qt.ItemDataRole.ForegroundRole:
                return _colour(row, column)
            case Qt.ItemDataRole.FontRole:
                return theme.caption_font() if column == SCORES else theme.figures_font()
            case Qt.ItemDataRole.TextAlignmentRole:
                return _RIGHT if column > SCORES else _LEFT
            case Qt.ItemDataRole.ToolTipRole:
                return _tip(row)
            case _ if role == HISTOGRAM_ROLE and column == SCORES and not row["error"]:
                return self._scores.get(row["name"], []), theme.reward_colour(index.row())
        return None

    def _text(self, row: Mapping[str, Any], column: int) -> str:
        if column == REWARD:
            return row["label"]
        if column == SCORES:
            return _failure(row["error"]) if row["error"] else "" if self._scores.get(row["name"]) else "no opinion"
        if column == WEIGHT:
            return number_text(float(row["weight"]))
        if row["error"]:
            return DASH
        scores = self._scores.get(row["name"])
        return _took(row["seconds"]) if column == TIME else figure(sum(scores) / len(scores)) if scores else DASH


class ScoreHistogramDelegate(QStyledItemDelegate):
    """Paints a histogram of a function's scores, with the lowest score on its left and the highest on its right."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, option, index)
        histogram = index.data(HISTOGRAM_ROLE)
        if not histogram or not histogram[0]:
            return
        scores, colour = histogram
        rect: QRect = option.rect.adjusted(CELL_PADDING, 4, -CELL_PADDING, -4)  # pyright: ignore
        painter.save()
        painter.setFont(theme.figures_font(theme.CAPTION))
        painter.setPen(theme.palette().muted)
        low, high = figure(min(scores)), figure(max(scores))
        metrics = painter.fontMetrics()
        edge = metrics.horizontalAdvance("−0.000") + 4  # the same in every row, so that the bars line up
        bars = rect.adjusted(edge, 0, -edge, 0)
        bars.setWidth(min(bars.width(), BINS * MAX_BAR_WIDTH))
        painter.drawText(rect, _LEFT, low)
        if low != high:
            painter.drawText(QRect(bars.right() + 6, rect.top(), edge, rect.height()), _LEFT, high)
        _draw_bars(painter, bars, scores, colour)
        painter.restore()


class BenchWeightDelegate(WeightDelegate):
    """Edits a weight on the bench, where its effect on the rewards is visible."""

    def createEditor(self, parent: QWidget, option: QStyleOptionViewItem, index: Index) -> QWidget:
        edit = super().createEditor(parent, option, index)
        edit.setAccessibleName(f"Weight of {index.model().index(index.row(), REWARD).data()}")
        return edit

    def updateEditorGeometry(self, editor: QWidget, option: Any, index: Index) -> None:
        editor.setGeometry(option.rect.adjusted(2, 1, -1, -1))


class BenchFunctionTable(BaseTable):
    """The table view; the weights can be edited.

    Signals:
        error_requested(function's row) – the row of a function that failed was clicked.
    """

    error_requested = Signal(object)

    def __init__(self, model: BenchFunctionModel) -> None:
        super().__init__()
        self._board = model
        self.setModel(model)
        self.setItemDelegateForColumn(SCORES, ScoreHistogramDelegate(self))
        self.setItemDelegateForColumn(WEIGHT, BenchWeightDelegate(self))
        triggers = QAbstractItemView.EditTrigger
        self.setEditTriggers(triggers.SelectedClicked | triggers.DoubleClicked | triggers.EditKeyPressed)
        self.setAccessibleName("Reward functions and their scores")
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        head = self.horizontalHeader()
        head.setMinimumSectionSize(40)
        for column, width in ((REWARD, 148), (MEAN, 64), (WEIGHT, 60), (TIME, 72)):
            head.setSectionResizeMode(column, QHeaderView.ResizeMode.Fixed)
            self.setColumnWidth(column, theme.scaled(width))
        head.setSectionResizeMode(SCORES, QHeaderView.ResizeMode.Stretch)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        model.modelReset.connect(self.fit)
        self.clicked.connect(self._show_error)
        self.activated.connect(self._show_error)
        self._max_rows = 6
        self.fit()

    def show_at_most(self, rows: int) -> None:
        """Limit the height to this number of rows; beyond it the table scrolls."""
        self._max_rows = rows
        self.fit()

    def fit(self) -> None:
        """Make the table as high as its rows, up to the limit."""
        rows = min(self.model().rowCount(), self._max_rows)
        self.setFixedHeight(self.horizontalHeader().sizeHint().height() + max(rows, 1) * theme.scaled(ROW_HEIGHT) + 1)

    def _show_error(self, index: QModelIndex) -> None:
        row = self._board.rows[index.row()]
        if row["error"]:
            self.error_requested.emit(row)


def _draw_bars(painter: QPainter, rect: QRect, scores: Sequence[float], colour: QColor) -> None:
    low, high = min(scores), max(scores)
    counts = [0] * BINS
    for score in scores:
        counts[min(BINS - 1, int((score - low) / (high - low) * BINS)) if high > low else 0] += 1
    width, most = min(rect.width() / BINS, MAX_BAR_WIDTH), max(counts)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(theme.palette().hairline)
    painter.drawRect(QRectF(rect.left(), rect.bottom(), min(rect.width(), BINS * MAX_BAR_WIDTH), 1))
    painter.setBrush(colour)
    for i, count in enumerate(counts):
        if count:  # at least three pixels: one outlier among a thousand scores must be visible
            height = max(3.0, rect.height() * count / most)
            painter.drawRect(QRectF(rect.left() + i * width, rect.bottom() - height, max(width - 1, 2), height))


def _failure(error: Mapping[str, Any]) -> str:
    """What failed, in short; the full sentence is in the tool tip and in the findings."""
    return f"failed on line {error['line']}" if error["line"] else "failed"


def _took(seconds: float) -> str:
    if seconds < 0.0005:
        return f"<{THIN}1{THIN}ms"
    return f"{round(seconds * 1000)}{THIN}ms" if seconds < 1 else f"{figure(seconds)}{THIN}s"


def _colour(row: Mapping[str, Any], column: int) -> QColor:
    colours = theme.palette()
    if row["error"]:
        return colours.bad if column in (REWARD, SCORES) else colours.muted
    return colours.text if column in (REWARD, MEAN) else colours.muted


def _tip(row: Mapping[str, Any]) -> str:
    if row["error"]:
        return row["error"]["sentence"]
    printed = f"\n\nIt printed:\n{row['printed'].rstrip()}" if row.get("printed") else ""
    return f"{row['name']}{printed}"
