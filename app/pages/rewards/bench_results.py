"""The results of the bench: the findings, the reward functions with their scores, and every completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from PySide6.QtCore import (
    QAbstractTableModel,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPointF,
    QRect,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFrame,
    QHBoxLayout,
    QHeaderView,
    QSizePolicy,
    QStackedLayout,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.theme import CELL_PADDING
from app.widgets.basic.labels import label
from app.widgets.basic.layout import clear_layout
from app.widgets.basic.number_format import DASH, THIN, figure
from app.widgets.basic.tables import ROW_HEIGHT, BaseTable
from app.widgets.completions.completion_model import CompletionModel, reward_dot
from app.widgets.completions.completion_table import CompletionTable
from app.widgets.form.value_text import number_text
from app.widgets.reward_delegates import WeightDelegate

# The reward functions on the bench: for each a histogram of its scores, their mean, its weight, its time, or its
# error.

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


# ── findings card ────────────────────────────────────────────────────────────────────────────────────────────────────

# The findings of the bench in words: the first one as headline, each with a dot in the colour of its level.

LEVEL_ROLES = {"error": "bad", "warning": "warning", "note": "muted", "good": "good"}
"""Level of a finding → role of the palette."""


class FindingsCard(QFrame):
    """A card of findings; hidden while there are none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setAccessibleName("Verdict")
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Maximum)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(12, 10, 12, 10)
        self._column.setSpacing(6)
        self._findings: Sequence[Mapping[str, str]] = ()
        self._max_count = 99

    def show_findings(self, findings: Sequence[Mapping[str, str]]) -> None:
        """Show findings {"level", "sentence", "advice"} in their order; the first one is the headline."""
        self._findings = findings
        self._show()

    def show_at_most(self, count: int) -> None:
        """Show only the first `count` findings, for a page of little height."""
        if count != self._max_count:
            self._max_count = count
            self._show()

    def sentences(self) -> list[str]:
        """The sentences of all findings, shown or not."""
        return [finding["sentence"] for finding in self._findings]

    def _show(self) -> None:
        clear_layout(self._column)
        for i, finding in enumerate(self._findings[: self._max_count]):
            self._column.addWidget(_FindingRow(finding, first=i == 0))
        self.setVisible(bool(self._findings))


class _FindingRow(QWidget):
    """A dot, the sentence, and the advice below it."""

    def __init__(self, finding: Mapping[str, str], *, first: bool) -> None:
        super().__init__()
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(theme.SPACE)
        row.addWidget(_LevelDot(LEVEL_ROLES.get(finding["level"], "muted")), 0, Qt.AlignmentFlag.AlignTop)
        text = QVBoxLayout()
        text.setSpacing(0)
        font = theme.heading_font() if first and finding["level"] != "error" else None
        text.addWidget(label(finding["sentence"], font, wrap=True, selectable=True))
        if finding["advice"]:
            text.addWidget(label(finding["advice"], role="muted", wrap=True, selectable=True))
        row.addLayout(text, 1)


class _LevelDot(QWidget):
    """A dot at the height of the first line of text."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role
        self.setFixedSize(theme.scaled_size(QSize(10, 18)))

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(getattr(theme.palette(), self._role))
        across = theme.scaled(10)
        painter.drawEllipse(QPointF(across / 2, self.height() / 2), 0.4 * across, 0.4 * across)


# ── bench completion table ───────────────────────────────────────────────────────────────────────────────────────────

# The completions on the bench: the completions table with narrow columns of scores, each headed by its function's
# dot.

NARROW, TEXT = 54, 150
"""Width of a column of scores, and least width of the text, in pixels."""


class BenchCompletionModel(CompletionModel):
    """Headers of scores are dots without text; `label` has the text."""

    def label(self, column: int) -> str:
        """The header of a column as text, also where only a dot is shown."""
        return " ".join(str(super().headerData(column, Qt.Orientation.Horizontal)).split())

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        is_score = orientation == Qt.Orientation.Horizontal and 0 < section <= len(self.rewards)
        if is_score and role == Qt.ItemDataRole.DisplayRole:
            return ""
        if is_score and role in (Qt.ItemDataRole.ToolTipRole, Qt.ItemDataRole.AccessibleTextRole):
            return self.label(section)
        return super().headerData(section, orientation, role)


class BenchCompletionTable(CompletionTable):
    """The table view; copied rows have the functions' labels in their header line."""

    def __init__(self, model: BenchCompletionModel) -> None:
        super().__init__(model, max_score_width=NARROW, min_text_width=TEXT)
        self._scores = model

    def as_text(self, rows: list[int]) -> str:
        headers = [self._scores.label(column) for column in range(self._scores.columnCount())]
        return "\n".join(["\t".join(headers), *BaseTable.as_text(self, rows).split("\n")[1:]])


# ── bench results ────────────────────────────────────────────────────────────────────────────────────────────────────

SHORT, TALL = 560, 760
"""Heights of the page, in pixels, below which fewer findings and functions are shown."""
STALE = {
    "level": "note",
    "sentence": "Settings or files have changed since these scores.",
    "advice": "Press Score again.",
}


class BenchState(Protocol):
    """The attributes of the bench that are shown; `app.state.reward_bench.RewardBench` has them."""

    groups: list[dict[str, Any]]
    findings: list[dict[str, str]]
    functions: list[dict[str, Any]]
    failed: dict[str, Any] | None
    stale: bool


class BenchResults(QWidget):
    """Findings, functions and completions; before there are any, what the page is for.

    Attributes:
        verdict – the findings.
        functions, board – the model and the table of reward functions.
        completions, table – the model and the table of completions.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        shown = QWidget(self)
        self.verdict = FindingsCard(shown)
        self.functions = BenchFunctionModel(self)
        self.board = BenchFunctionTable(self.functions)
        self.completions = BenchCompletionModel(self)
        self.table = BenchCompletionTable(self.completions)
        column = QVBoxLayout(shown)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(12)
        column.addWidget(self.verdict)
        column.addWidget(self.board.in_card())
        column.addWidget(self.table.in_card(), 1)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(_empty_card())
        self._stack.addWidget(shown)

    def fit(self, height: int) -> None:
        """Limit findings and functions so that the completions get some of a page of this height, in pixels."""
        height = round(height / theme.text_scale())
        self.verdict.show_at_most(1 if height < SHORT else 2 if height < TALL else 99)
        self.board.show_at_most(3 if height < SHORT else 5 if height < TALL else 8)

    def show_bench(self, bench: BenchState) -> None:
        """Show the bench's state; the current line of the completions stays current."""
        self._stack.setCurrentIndex(1 if bench.groups or bench.failed else 0)
        findings = [_failed(bench.failed)] if bench.failed else bench.findings
        self.verdict.show_findings(([STALE] if bench.stale and not bench.failed else []) + list(findings))
        self.functions.show_functions(bench.functions, bench.groups)
        names, labels = ([function[key] for function in bench.functions] for key in ("name", "label"))
        row = max(self.table.currentIndex().row(), 0)
        self.completions.show_groups(bench.groups, names, labels)
        self.table.reset_view()
        if 0 < row < self.completions.rowCount():
            self.table.selectRow(row)


def _failed(error: dict[str, Any]) -> dict[str, str]:
    return {"level": "error", "sentence": error["sentence"], "advice": "A run would stop before its first step."}


def _empty_card() -> QFrame:
    card = QFrame()
    card.setProperty("role", "card")
    column = QVBoxLayout(card)
    column.setContentsMargins(*(3 * theme.SPACE,) * 4)
    column.setSpacing(12)
    centre = Qt.AlignmentFlag.AlignCenter
    column.addStretch(2)
    column.addWidget(label("Try the rewards before training", theme.heading_font(), align=centre))
    sentence = (
        "Sample a few completions, and see what each function gives them, where the groups differ, and whether there is "
        "anything to learn from."
    )
    column.addWidget(label(sentence, role="muted", wrap=True, align=centre))
    column.addStretch(3)
    return card
