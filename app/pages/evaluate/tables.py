"""The tables of an evaluation: figures with a forest plot, and prompts with their rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PySide6.QtCore import QPointF, QRect, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QFont, QPainter, QPen
from PySide6.QtWidgets import QHeaderView

from app import theme
from app.theme import CELL_PADDING
from app.widgets.basic.number_format import DASH, MINUS, figure, signed
from app.widgets.basic.tables import BaseTable, CellDelegate, Column, Index, RowsModel
from app.widgets.completion_table import advantage_colour, one_line, reward_dot
from backend.trainer.evaluation.evaluation_rows import SAME, Decoding, MeanWithInterval

NAME, BEFORE, AFTER, FOREST, CHANGE, INTERVAL = range(6)
MIN_FOREST, MIN_NAME, MAX_NAME = 80, 104, 200
INTERVAL_ROLE = Qt.ItemDataRole.UserRole
"""Item role: (low, value, high) as places from 0 to 1 on the axis, the place of zero, and the colour."""
ROW, PROMPT, ROW_BEFORE, ROW_AFTER, ROW_CHANGE = range(5)
Kind = Literal["all", "better", "worse", "unchanged"]


@dataclass(frozen=True, slots=True)
class FigureLine:
    """A figure of both sides and its difference; of a single side, `after` alone.

    `reward` names the reward function, if it is of one. `on_axis` is False for a figure in another unit.
    `better` is 1 where more is better, −1 where less is, 0 where neither.
    """

    name: str
    before: MeanWithInterval | None
    after: MeanWithInterval
    difference: MeanWithInterval | None
    reward: str = ""
    unit: str = ""
    is_total: bool = False
    on_axis: bool = True
    better: int = 1

    @property
    def interval(self) -> MeanWithInterval:
        return self.after if self.difference is None else self.difference

    def fixed(self, value: float | None) -> str:
        if value is None:
            return DASH
        factor = 100 if self.unit == "share" else 1
        means = [mean.value for mean in (self.before, self.after, self.difference) if mean is not None]
        largest = max((abs(mean) * factor for mean in means if mean is not None), default=0.0)
        decimals = max(int(factor > 1), 2 - math.floor(math.log10(largest))) if largest > 0 else 2
        text = f"{abs(value) * factor:.{min(decimals, 6)}f}"
        if not float(text):
            return "0"
        return f"{MINUS if value < 0 else '+' if self.difference is not None else ''}{text}"


def figure_lines(decoding: Decoding, labels: Mapping[str, str]) -> list[FigureLine]:
    """Reward, functions, pass@k, tokens, share cut off."""
    after = (decoding.sides.get("tuned") or next(iter(decoding.sides.values()))).figures
    before = decoding.sides["base"].figures if decoding.difference is not None else None
    change = decoding.difference

    def line(name: str, of: Any, **more: Any) -> FigureLine:
        return FigureLine(name, of(before) if before else None, of(after), of(change) if change else None, **more)

    lines = [line("Reward", lambda figures: figures.reward, is_total=True)]
    for name in after.rewards:
        lines.append(line(labels.get(name, name), lambda figures, name=name: figures.rewards[name], reward=name))
    for k in after.pass_at:
        lines.append(line(f"Pass@{k}", lambda figures, k=k: figures.pass_at[k], unit="share"))
    lines.append(line("Tokens", lambda figures: figures.tokens, on_axis=False))
    lines.append(line("Cut off", lambda figures: figures.cut_off, unit="share", better=-1))
    if all(side.figures.spread is not None for side in decoding.sides.values()):
        lines.append(line("Spread of a prompt", lambda figures: figures.spread, better=0))
        lines.append(line("Different texts", lambda figures: figures.different, unit="share", better=0))
    return lines


class FigureModel(RowsModel):
    rows: Sequence[FigureLine]

    _axis = (0.0, 1.0)
    has_difference = False

    def show_lines(self, lines: Sequence[FigureLine], after: str) -> None:
        """`after` heads the column of the later side, or of the only one."""
        intervals = [line.interval for line in lines if line.on_axis]
        ends = [end for each in intervals for end in (each.low, each.value, each.high) if end is not None]
        low, high = min([0.0, *ends]), max([0.0, *ends])
        margin = 0.04 * (high - low or 1.0)
        self._axis = (low - margin, high + margin)
        self.has_difference = any(line.difference is not None for line in lines)
        plot_tip = "Change of the mean with its 95 % interval. The line is zero."
        self.columns = (
            Column(""),
            Column("Base", 72, is_figure=True),
            Column(after, 72, is_figure=True),
            Column("Difference" if self.has_difference else "", tip=plot_tip),
            Column("Change", 84, is_figure=True, tip="Tuned minus base; of shares, in percentage points."),
            Column("95 % interval", 152, is_figure=True, tip="95 % bootstrap interval over prompts."),
        )
        self.set_rows(lines)

    def text(self, row: FigureLine, column: int) -> str:
        interval = row.interval
        has_interval = interval.low is not None and interval.high is not None
        return (
            row.name,
            figure(row.before.value, row.unit) if row.before is not None else "",
            figure(row.after.value, row.unit),
            "",
            row.fixed(row.difference.value) if row.difference is not None else "",
            f"{row.fixed(interval.low)} to {row.fixed(interval.high)}" if has_interval else DASH,
        )[column]

    def colour(self, row: FigureLine, column: int) -> QColor:
        colours = theme.palette()
        if column == CHANGE and row.difference is not None and row.difference.excludes_zero and row.on_axis:
            rise = (row.difference.value or 0) * row.better
            return colours.good if rise > 0 else colours.bad if rise < 0 else colours.text
        return colours.muted if column in (BEFORE, INTERVAL) else colours.text

    def font(self, row: FigureLine, column: int) -> QFont:
        return theme.figures_font(theme.BODY, QFont.Weight.DemiBold if row.is_total else QFont.Weight.Normal)

    def extra(self, row: FigureLine, index: Index, role: int) -> Any:
        if role == Qt.ItemDataRole.DecorationRole and index.column() == NAME and row.reward:
            return reward_dot(row.reward)
        if role != INTERVAL_ROLE or index.column() != FOREST or not row.on_axis or row.interval.value is None:
            return None
        value, colours = row.interval.value, theme.palette()
        low = value if row.interval.low is None else row.interval.low
        high = value if row.interval.high is None else row.interval.high
        left, right = self._axis
        places = tuple((place - left) / (right - left) for place in (low, value, high, 0.0))
        if row.reward:
            return (*places, theme.reward_colour(row.reward))
        return (*places, colours.accent if row.is_total else colours.muted)


def draw_interval(painter: QPainter, rect: QRect, interval: tuple[Any, ...]) -> None:
    """Draw an interval as a line and its mean as a dot, and the axis' zero as a hairline through all rows."""
    *places, colour = interval
    left, width = rect.left() + CELL_PADDING, rect.width() - 2 * CELL_PADDING
    low, value, high, zero = (left + place * width for place in places)
    middle = rect.center().y() + 0.5
    painter.setPen(QPen(theme.palette().outline, 1))
    painter.drawLine(QPointF(zero, rect.top()), QPointF(zero, rect.bottom() + 1))
    painter.setPen(QPen(colour, 2, Qt.PenStyle.SolidLine, Qt.PenCapStyle.FlatCap))
    painter.drawLine(QPointF(low, middle), QPointF(high, middle))
    for end in (low, high):
        painter.drawLine(QPointF(end, middle - 3.5), QPointF(end, middle + 3.5))
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(colour)
    painter.drawEllipse(QRectF(value - 4, middle - 4, 8, 8))


class FiguresTable(BaseTable):
    """The table of figures. A narrow one leaves out the interval as text, then the sides: the plot stays."""

    def __init__(self, model: FigureModel) -> None:
        model.show_lines([], "Tuned")
        super().__init__(model=model, name="Figures with intervals")
        self._figures = model
        self.setItemDelegateForColumn(FOREST, CellDelegate(INTERVAL_ROLE, draw_interval, self))
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        model.modelReset.connect(self.fit_columns)

    def fit_columns(self) -> None:
        model, available, least = self._figures, self.viewport().width(), theme.scaled(MIN_FOREST)
        widths = {place: theme.scaled(each.width) for place, each in enumerate(model.columns) if each.width}
        longest = max((self.fontMetrics().horizontalAdvance(line.name) for line in model.rows), default=0)
        name = max(theme.scaled(MIN_NAME), min(theme.scaled(MAX_NAME), longest + theme.scaled(36)))
        shown = [BEFORE, AFTER, CHANGE, INTERVAL] if model.has_difference else [AFTER, INTERVAL]
        for dropped in (INTERVAL, BEFORE, AFTER):
            if name + sum(widths[place] for place in shown) + least <= available:
                break
            shown = [place for place in shown if place != dropped]
        for place, width in widths.items():
            self.setColumnHidden(place, place not in shown)
            self.setColumnWidth(place, width)
        self.setColumnWidth(NAME, name)
        self.setColumnWidth(FOREST, max(least, available - name - sum(widths[place] for place in shown)))


@dataclass(frozen=True, slots=True)
class RowLine:
    """A prompt: its place among the rows that were read, its number in the split from 1, its text and its means."""

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


class PromptRowModel(RowsModel):
    """The prompts of one kind: better ones by the largest gain, worse ones by the largest loss, else in split order."""

    rows: Sequence[RowLine]
    has_both_sides = False

    def show_lines(self, lines: Sequence[RowLine], kind: str) -> None:
        self.has_both_sides = any(line.before is not None for line in lines)
        tip = "Mean reward of the prompt's completions."
        self.columns = (
            Column("Row", 48, is_figure=True),
            Column("Prompt"),
            Column("Base", 62, is_figure=True, tip=tip),
            Column("Tuned" if self.has_both_sides else "Reward", 62, is_figure=True, tip=tip),
            Column("Change", 74, is_figure=True),
        )
        chosen = [line for line in lines if kind in ("all", line.kind)]
        if kind in ("better", "worse"):
            chosen.sort(key=lambda line: -abs(line.change or 0.0))
        self.set_rows(chosen)

    def text(self, row: RowLine, column: int) -> str:
        prompt = one_line(row.prompt)
        return (str(row.number), prompt, figure(row.before), figure(row.after), signed(row.change))[column]

    def colour(self, row: RowLine, column: int) -> Any:
        if column == ROW_CHANGE:
            return advantage_colour(row.change)
        return theme.palette().text if column in (PROMPT, ROW_AFTER) else theme.palette().muted

    def font(self, row: RowLine, column: int) -> QFont:
        return theme.mono_font() if column == PROMPT else theme.figures_font()


class PromptRowTable(BaseTable):
    chosen = Signal(int)  # place of a row

    def __init__(self, model: PromptRowModel) -> None:
        model.show_lines([], "all")
        super().__init__(model=model, name="Prompts")
        self._rows = model
        self.selectionModel().currentRowChanged.connect(
            lambda current, _: current.isValid() and self.chosen.emit(model.rows[current.row()].place)
        )
        model.modelReset.connect(self._on_reset)

    def _on_reset(self) -> None:
        for place in (ROW_BEFORE, ROW_CHANGE):
            self.setColumnHidden(place, not self._rows.has_both_sides)
        if self._rows.rows:
            self.selectRow(0)
        else:
            self.chosen.emit(-1)
