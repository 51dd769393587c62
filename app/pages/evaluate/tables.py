"""The figures of an evaluation as a table, with a forest plot in one of its columns: the interval of every difference on one axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PySide6.QtCore import (
    QAbstractTableModel,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPointF,
    QRect,
    QRectF,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QFont, QPainter, QPen, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QStyledItemDelegate, QStyleOptionViewItem

from app import theme
from app.theme import CELL_PADDING
from app.widgets.basic.number_format import DASH, MINUS, figure, signed
from app.widgets.basic.tables import BaseTable
from app.widgets.completions.completion_model import advantage_colour, one_line, reward_dot
from backend.trainer.evaluation.evaluation_rows import SAME, Decoding, Figures, MeanWithInterval

Index = QModelIndex | QPersistentModelIndex
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
_NAME, _BEFORE, _AFTER, _FOREST, _CHANGE, _INTERVAL = range(6)
_WIDTHS = {_BEFORE: 64, _AFTER: 64, _CHANGE: 72, _INTERVAL: 152}
_MIN_FOREST, _MIN_NAME, _MAX_NAME = 80, 104, 200
INTERVAL_ROLE = Qt.ItemDataRole.UserRole
"""Item role: (low, value, high) as places from 0 to 1 on the axis, the place of zero, and the colour."""
_TIPS = {
    _FOREST: "How far the mean moved, with the interval that covers the true difference in 95 of 100 cases. The line is zero.",
    _CHANGE: "Tuned minus base; of shares, in percentage points.",
    _INTERVAL: "95 % bootstrap interval over prompts.",
}


@dataclass(frozen=True, slots=True)
class FigureLine:
    """A line: a figure of both sides and its difference; of a single side, `after` alone. `interval` is what the axis shows, None for
    a figure in another unit. `reward`: index of the reward function, −1 for none. `better`: 1 where more is better, −1 where less is, 0 where neither."""

    name: str
    before: MeanWithInterval | None
    after: MeanWithInterval
    difference: MeanWithInterval | None
    reward: int = -1
    unit: str = ""
    is_total: bool = False
    on_axis: bool = True
    better: int = 1

    @property
    def interval(self) -> MeanWithInterval:
        return self.after if self.difference is None else self.difference

    def fixed(self, value: float | None) -> str:
        """A difference, or an end of an interval, with as many decimals as the largest mean of the line has with three digits: more
        would be noise. Shares in percent; a difference with its sign."""
        if value is None:
            return DASH
        factor = 100 if self.unit == "share" else 1
        means = [mean.value for mean in (self.before, self.after, self.difference) if mean is not None]
        largest = max((abs(mean) * factor for mean in means if mean is not None), default=0.0)
        decimals = max(int(factor > 1), 2 - math.floor(math.log10(largest))) if largest > 0 else 2
        text = f"{abs(value) * factor:.{min(decimals, 6)}f}"
        if not float(text):
            return "0"
        sign = MINUS if value < 0 else "+" if self.difference is not None else ""
        return f"{sign}{text}"


def figure_lines(decoding: Decoding, labels: Mapping[str, str]) -> list[FigureLine]:
    """The lines of a decoding: reward, every function by its label, pass@k, tokens, share cut off; of several completions a prompt, how much
    their rewards and texts differ."""
    after = (decoding.sides.get("tuned") or next(iter(decoding.sides.values()))).figures
    before = decoding.sides["base"].figures if decoding.difference is not None else None
    change = decoding.difference

    def line(name: str, of: Any, **more: Any) -> FigureLine:
        return FigureLine(name, of(before) if before else None, of(after), of(change) if change else None, **more)

    lines = [line("Reward", lambda figures: figures.reward, is_total=True)]
    for index, name in enumerate(after.rewards):
        lines.append(line(labels.get(name, name), lambda figures, name=name: figures.rewards[name], reward=index))
    for k in after.pass_at:
        lines.append(line(f"Pass@{k}", lambda figures, k=k: figures.pass_at[k], unit="share"))
    lines.append(line("Tokens", _tokens, on_axis=False))
    lines.append(line("Cut off", lambda figures: figures.cut_off, unit="share", better=-1))
    if all(side.figures.spread is not None for side in decoding.sides.values()):
        lines.append(line("Spread of a prompt", lambda figures: figures.spread, better=0))
        lines.append(line("Different texts", lambda figures: figures.different, unit="share", better=0))
    return lines


def _tokens(figures: Figures) -> MeanWithInterval:
    return figures.tokens


class FigureModel(QAbstractTableModel):
    """Columns: name, before, after, forest, difference, interval.

    Attributes:
        lines – the table's lines.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.lines: list[FigureLine] = []
        self._axis = (0.0, 1.0)
        self._after = "Tuned"
        theme.signals.changed.connect(self._recolour)

    @property
    def has_difference(self) -> bool:
        return any(line.difference is not None for line in self.lines)

    def show_lines(self, lines: list[FigureLine], after: str) -> None:
        """`after` heads the column of the later side, or of the only one."""
        self.beginResetModel()
        self.lines, self._after = lines, after
        ends = [0.0]
        for line in lines:
            if line.on_axis:
                interval = line.interval
                ends += [end for end in (interval.low, interval.value, interval.high) if end is not None]
        margin = 0.04 * (max(ends) - min(ends) or 1.0)
        self._axis = (min(ends) - margin, max(ends) + margin)
        self.endResetModel()

    def _recolour(self) -> None:
        if self.lines:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.lines) - 1, _INTERVAL))

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.lines)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else 6

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            plot = "Difference" if self.has_difference else ""
            return ("", "Base", self._after, plot, "Change", "95 % interval")[section]
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _LEFT if section in (_NAME, _FOREST) else _RIGHT
        return _TIPS.get(section) if role == Qt.ItemDataRole.ToolTipRole else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        line, column = self.lines[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(line, column)
        if role == Qt.ItemDataRole.DecorationRole and column == _NAME and line.reward >= 0:
            return reward_dot(line.reward)
        if role == Qt.ItemDataRole.ForegroundRole:
            return self._colour(line, column)
        if role == Qt.ItemDataRole.FontRole:
            weight = QFont.Weight.DemiBold if line.is_total else QFont.Weight.Normal
            return theme.figures_font(theme.BODY, weight)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _LEFT if column == _NAME else _RIGHT
        return self._interval(line) if role == INTERVAL_ROLE and column == _FOREST else None

    def _text(self, line: FigureLine, column: int) -> str:
        interval = line.interval
        if column == _NAME:
            return line.name
        if column == _BEFORE:
            return figure(line.before.value, line.unit) if line.before is not None else ""
        if column == _AFTER:
            return figure(line.after.value, line.unit)
        if column == _CHANGE:
            return line.fixed(line.difference.value) if line.difference is not None else ""
        if column == _INTERVAL and interval.low is not None and interval.high is not None:
            return f"{line.fixed(interval.low)} to {line.fixed(interval.high)}"
        return DASH if column == _INTERVAL else ""

    def _colour(self, line: FigureLine, column: int) -> QColor:
        colours = theme.palette()
        if column == _CHANGE and line.difference is not None and line.difference.excludes_zero and line.on_axis:
            rise = (line.difference.value or 0) * line.better
            return colours.good if rise > 0 else colours.bad if rise < 0 else colours.text
        return colours.muted if column in (_BEFORE, _INTERVAL) else colours.text

    def _interval(self, line: FigureLine) -> tuple[float, float, float, float, QColor] | None:
        interval = line.interval
        if not line.on_axis or interval.value is None:
            return None
        low = interval.value if interval.low is None else interval.low
        high = interval.value if interval.high is None else interval.high
        colours = theme.palette()
        colour = (
            theme.reward_colour(line.reward) if line.reward >= 0 else colours.accent if line.is_total else colours.muted
        )
        return self._place(low), self._place(interval.value), self._place(high), self._place(0.0), colour

    def _place(self, value: float) -> float:
        left, right = self._axis
        return (value - left) / (right - left)


class ForestDelegate(QStyledItemDelegate):
    """Paints an interval as a line and its mean as a dot, and the axis' zero as a hairline through all rows."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, option, index)
        interval = index.data(INTERVAL_ROLE)
        if interval is None:
            return
        *places, colour = interval
        rect: QRect = option.rect  # pyright: ignore[reportAttributeAccessIssue]
        left, width = rect.left() + CELL_PADDING, rect.width() - 2 * CELL_PADDING
        low, value, high, zero = (left + place * width for place in places)
        middle = rect.center().y() + 0.5
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(theme.palette().outline, 1))
        painter.drawLine(QPointF(zero, rect.top()), QPointF(zero, rect.bottom() + 1))
        painter.setPen(QPen(colour, 2, Qt.PenStyle.SolidLine, Qt.PenCapStyle.FlatCap))
        painter.drawLine(QPointF(low, middle), QPointF(high, middle))
        for end in (low, high):
            painter.drawLine(QPointF(end, middle - 3.5), QPointF(end, middle + 3.5))
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour)
        painter.drawEllipse(QRectF(value - 4, middle - 4, 8, 8))
        painter.restore()


class FiguresTable(BaseTable):
    """The view. A narrow one leaves out the interval as text, then the sides: the plot stays."""

    def __init__(self, model: FigureModel) -> None:
        super().__init__()
        self._figures = model
        self.setModel(model)
        self.setItemDelegateForColumn(_FOREST, ForestDelegate(self))
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setAccessibleName("Figures with intervals")
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        self.horizontalHeader().setMinimumSectionSize(40)
        model.modelReset.connect(self._fit_columns)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_columns()

    def _fit_columns(self) -> None:
        has_difference, available = self._figures.has_difference, self.viewport().width()
        metrics = self.fontMetrics()
        longest = max((metrics.horizontalAdvance(line.name) for line in self._figures.lines), default=0)
        name = max(theme.scaled(_MIN_NAME), min(theme.scaled(_MAX_NAME), longest + theme.scaled(36)))
        shown = [_BEFORE, _AFTER, _CHANGE, _INTERVAL] if has_difference else [_AFTER, _INTERVAL]
        for dropped in (_INTERVAL, _BEFORE, _AFTER):
            if name + sum(theme.scaled(_WIDTHS[column]) for column in shown) + theme.scaled(_MIN_FOREST) <= available:
                break
            shown = [column for column in shown if column != dropped]
        for column, width in _WIDTHS.items():
            self.setColumnHidden(column, column not in shown)
            self.setColumnWidth(column, theme.scaled(width))
        self.setColumnWidth(_NAME, name)
        used = name + sum(theme.scaled(_WIDTHS[column]) for column in shown)
        self.setColumnWidth(_FOREST, max(theme.scaled(_MIN_FOREST), available - used))


_HEADERS = ("Row", "Prompt", "Base", "Tuned", "Change")
_ROW, _PROMPT, _ROW_BEFORE, _ROW_AFTER, _ROW_CHANGE = range(5)
_ROW_WIDTHS = {_ROW: 48, _ROW_BEFORE: 62, _ROW_AFTER: 62, _ROW_CHANGE: 74}

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
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.lines) - 1, _ROW_CHANGE))

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.lines)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(_HEADERS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return _HEADERS[section] if self.has_both_sides or section != _ROW_AFTER else "Reward"
        if role == Qt.ItemDataRole.ToolTipRole and section in (_ROW_BEFORE, _ROW_AFTER):
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
            if column == _ROW_CHANGE:
                return advantage_colour(line.change)
            return theme.palette().text if column in (_PROMPT, _ROW_AFTER) else theme.palette().muted
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
        for column, width in _ROW_WIDTHS.items():
            self.setColumnWidth(column, theme.scaled(width))
        for column in (_ROW_BEFORE, _ROW_CHANGE):
            self.setColumnHidden(column, not self._rows.has_both_sides)

    def _emit_chosen(self, current: QModelIndex) -> None:
        if current.isValid() and current.row() < len(self._rows.lines):
            self.chosen.emit(self._rows.lines[current.row()].place)
