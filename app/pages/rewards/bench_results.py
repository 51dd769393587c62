"""The results of the bench: the findings, the reward functions with their scores, and every completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import QModelIndex, QRect, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QFont, QPainter
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFrame,
    QSizePolicy,
    QStackedLayout,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app import theme
from app.state.reward_bench import RewardBench
from app.theme import CELL_PADDING
from app.widgets.basic.controls import Dot
from app.widgets.basic.labels import EmptyState, label
from app.widgets.basic.layout import clear_layout, column, holder, row, wrap_in_card
from app.widgets.basic.number_format import DASH, figure, short_duration
from app.widgets.basic.tables import LEFT, BaseTable, Column, Index, RowsModel
from app.widgets.completion_table import CompletionModel, CompletionTable, reward_dot
from app.widgets.form.value_text import number_text
from app.widgets.reward_delegates import WeightDelegate

REWARD, SCORES, MEAN, WEIGHT, TIME = range(5)
HISTOGRAM_ROLE = Qt.ItemDataRole.UserRole
"""Item role of the Scores column: (scores, colour)."""
BINS, MAX_BAR_WIDTH = 24, 16
SHORT, TALL = 560, 760
LEVEL_ROLES = {"error": "bad", "warning": "warning", "note": "muted", "good": "good"}
"""Level of a finding → role of the palette."""
STALE = {
    "level": "note",
    "sentence": "Settings or files have changed since these scores.",
    "advice": "Press Score again.",
}
NOT_RUN_ADVICE = "A run would stop before its first step."


class BenchFunctionModel(RowsModel):
    columns = (
        Column("Reward", 148),
        Column("Scores"),
        Column("Mean", 64, is_figure=True),
        Column("Weight", 60, is_figure=True),
        Column("Time", 72, is_figure=True),
    )
    weighed = Signal(list)  # all weights
    rows: list[Mapping[str, Any]]

    def __init__(self, parent: Any = None) -> None:
        super().__init__(parent)
        self._scores: dict[str, list[float]] = {}

    def show_functions(self, functions: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        scores = [completion.get("rewards") or {} for group in groups for completion in group["completions"]]
        names = [function["name"] for function in functions]
        self._scores = {name: [each[name] for each in scores if each.get(name) is not None] for name in names}
        self.set_rows([{**function, "place": place} for place, function in enumerate(functions)])

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        return flags | Qt.ItemFlag.ItemIsEditable if index.column() == WEIGHT else flags

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        self.rows[index.row()] = {**self.rows[index.row()], "weight": float(value)}
        self.repaint()
        self.weighed.emit([float(each["weight"]) for each in self.rows])
        return True

    def text(self, row: Mapping[str, Any], column: int) -> str:
        error, scores = row["error"], self._scores.get(row["name"])
        if column == SCORES and error:
            return f"failed on line {error['line']}" if error["line"] else "failed"
        mean = figure(sum(scores) / len(scores)) if scores and not error else DASH
        time = DASH if error else short_duration(row["seconds"])
        return (row["label"], "" if scores else "no opinion", mean, number_text(float(row["weight"])), time)[column]

    def colour(self, row: Mapping[str, Any], column: int) -> QColor:
        colours = theme.palette()
        if row["error"]:
            return colours.bad if column in (REWARD, SCORES) else colours.muted
        return colours.text if column in (REWARD, MEAN) else colours.muted

    def font(self, row: Mapping[str, Any], column: int) -> QFont:
        return theme.caption_font() if column == SCORES else theme.figures_font()

    def tip(self, row: Mapping[str, Any], column: int) -> str:
        if row["error"]:
            return row["error"]["sentence"]
        return f"{row['name']}\n\nIt printed:\n{row['printed'].rstrip()}" if row.get("printed") else row["name"]

    def extra(self, row: Mapping[str, Any], index: Index, role: int) -> Any:
        match role, index.column():
            case Qt.ItemDataRole.EditRole, 3:
                return float(row["weight"])
            case Qt.ItemDataRole.AccessibleDescriptionRole, 3:
                return row["label"]
            case Qt.ItemDataRole.DecorationRole, 0:
                return reward_dot(row["place"])
            case _, 1 if role == HISTOGRAM_ROLE and not row["error"]:
                return self._scores.get(row["name"], []), theme.reward_colour(row["place"])
        return None


class ScoreHistogramDelegate(QStyledItemDelegate):
    """Paints a histogram of a function's scores, with the lowest score on its left and the highest on its right."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, option, index)
        scores, colour = index.data(HISTOGRAM_ROLE) or ([], None)
        if not scores:
            return
        rect: QRect = option.rect.adjusted(CELL_PADDING, 4, -CELL_PADDING, -4)  # pyright: ignore
        low, high = min(scores), max(scores)
        painter.save()
        painter.setFont(theme.figures_font(theme.CAPTION))
        painter.setPen(theme.palette().muted)
        edge = painter.fontMetrics().horizontalAdvance("−0.000") + 4  # the same in every row, so that the bars line up
        bars = rect.adjusted(edge, 0, -edge, 0)
        bars.setWidth(min(bars.width(), BINS * MAX_BAR_WIDTH))
        painter.drawText(rect, LEFT, figure(low))
        if low != high:
            painter.drawText(QRect(bars.right() + 6, rect.top(), edge, rect.height()), LEFT, figure(high))
        counts = [0] * BINS
        for score in scores:
            counts[min(BINS - 1, int((score - low) / (high - low) * BINS)) if high > low else 0] += 1
        width = bars.width() / BINS
        painter.fillRect(QRectF(bars.left(), bars.bottom(), bars.width(), 1), theme.palette().hairline)
        for i, count in enumerate(counts):
            if count:  # at least three pixels: one outlier among a thousand scores must be visible
                height = max(3.0, bars.height() * count / max(counts))
                painter.fillRect(
                    QRectF(bars.left() + i * width, bars.bottom() - height, max(width - 1, 2), height), colour
                )
        painter.restore()


class BenchFunctionTable(BaseTable):
    error_requested = Signal(object)  # function's row

    def __init__(self, model: BenchFunctionModel) -> None:
        super().__init__(model=model, name="Reward functions and their scores")
        self._model = model
        self._max_rows = 6
        self.setItemDelegateForColumn(SCORES, ScoreHistogramDelegate(self))
        self.setItemDelegateForColumn(WEIGHT, WeightDelegate(self))
        edit = QAbstractItemView.EditTrigger
        self.setEditTriggers(edit.SelectedClicked | edit.DoubleClicked | edit.EditKeyPressed)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        model.modelReset.connect(lambda: self.show_at_most(self._max_rows))
        self.clicked.connect(self._show_error)
        self.activated.connect(self._show_error)

    def show_at_most(self, rows: int) -> None:
        self._max_rows = rows
        self.fit_rows(rows, extra=1)

    def _show_error(self, index: QModelIndex) -> None:
        if self._model.rows[index.row()]["error"]:
            self.error_requested.emit(self._model.rows[index.row()])


class FindingsCard(QFrame):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setAccessibleName("Verdict")
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Maximum)
        self._column = column(into=self, spacing=6, margins=(12, 10, 12, 10))
        self.findings: Sequence[Mapping[str, str]] = ()
        self._max_count = 99

    def show_findings(self, findings: Sequence[Mapping[str, str]]) -> None:
        self.findings = findings
        clear_layout(self._column)
        for i, finding in enumerate(self.findings[: self._max_count]):
            font = theme.heading_font() if i == 0 and finding["level"] != "error" else None
            texts = [label(finding["sentence"], font, wrap=True, selectable=True)]
            if finding["advice"]:
                texts.append(label(finding["advice"], role="muted", wrap=True, selectable=True))
            dot = Dot(LEVEL_ROLES.get(finding["level"], "muted"), 18)
            self._column.addWidget(holder(row((dot, 0, Qt.AlignmentFlag.AlignTop), (column(*texts, spacing=0), 1))))
        self.setVisible(bool(findings))

    def show_at_most(self, count: int) -> None:
        """Show only the first `count` findings, for a page of little height."""
        if count != self._max_count:
            self._max_count = count
            self.show_findings(self.findings)


class BenchResults(QWidget):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        shown = QWidget(self)
        self.verdict = FindingsCard(shown)
        self.functions, self.completions = BenchFunctionModel(self), CompletionModel(self, is_brief=True)
        self.board = BenchFunctionTable(self.functions)
        self.table = CompletionTable(self.completions, max_score_width=54, min_text_width=150)
        column(self.verdict, self.board.in_card(), (self.table.in_card(), 1), into=shown, spacing=12)
        text = "Sample a few completions to see the scores of each function and how much the groups differ."
        empty = EmptyState("Try the rewards before training", text, "", theme.heading_font())
        self._stack = QStackedLayout(self)
        self._stack.addWidget(wrap_in_card(empty))
        self._stack.addWidget(shown)

    def fit(self, height: int) -> None:
        height = round(height / theme.text_scale())
        self.verdict.show_at_most(1 if height < SHORT else 2 if height < TALL else 99)
        self.board.show_at_most(3 if height < SHORT else 5 if height < TALL else 8)

    def show_bench(self, bench: RewardBench) -> None:
        self._stack.setCurrentIndex(1 if bench.groups or bench.failed else 0)
        if bench.failed:
            findings = [{"level": "error", "sentence": bench.failed["sentence"], "advice": NOT_RUN_ADVICE}]
        else:
            findings = [*([STALE] if bench.stale else []), *bench.findings]
        self.verdict.show_findings(findings)
        self.functions.show_functions(bench.functions, bench.groups)
        names, labels = ([function[key] for function in bench.functions] for key in ("name", "label"))
        current = max(self.table.currentIndex().row(), 0)
        self.completions.show_groups(bench.groups, names, labels)
        self.table.reset_view()
        if 0 < current < self.completions.rowCount():
            self.table.selectRow(current)
