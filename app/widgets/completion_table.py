"""Tables of completions: groups under their prompts, or completions from anywhere in a run one below the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Literal

from PySide6.QtCore import QModelIndex, QObject, QRect, Qt, Signal
from PySide6.QtGui import QColor, QFont, QKeyEvent, QMouseEvent, QPainter, QPixmap
from PySide6.QtWidgets import QHeaderView

from app import theme
from app.theme import CELL_PADDING
from app.widgets.basic import icons
from app.widgets.basic.labels import plain_tip
from app.widgets.basic.number_format import DASH, figure, finite, signed
from app.widgets.basic.tables import BaseTable, CellDelegate, Index, RowsModel
from backend.runs.completion_rows import (
    EXPLANATION,
    explanation_of,
    listed_completions,
    logged_of,
    policy_tokens,
    scores_of,
    turns_mark,
)
from backend.utils.text import visible

ROLE = Qt.ItemDataRole
BAR_ROLE = ROLE.UserRole  # item role: (length −1 to 1, colour) of the bar under a score
STOP_LABELS = {"eos": "ended", "string": "stop text", "length": "cut off"}  # stop reason of a completion → its label
PREVIEW_CHARS, HEADER_CHARS, TIP_CHARS = 400, 14, 80
MIN_FIGURE_WIDTH, MAX_FIGURE_WIDTH, MIN_TEXT_WIDTH, LOGGED_TEXT_WIDTH, DOT_WIDTH = 74, 124, 176, 112, 18
BRIEF_WIDTH, BRIEF_TEXT_WIDTH = 54, 140  # of a score, and least of the text, where the headers of scores are dots


def one_line(text: Any) -> str:
    """The beginning of a text on one line, line breaks replaced by spaces and other control characters escaped."""
    return visible(" ".join(text[:PREVIEW_CHARS].split())) if isinstance(text, str) else DASH


def shorten(word: str) -> str:
    half = HEADER_CHARS // 2
    return word if len(word) <= HEADER_CHARS else f"{word[:half]}…{word[-half:]}"


def logged_text(value: Any) -> str:
    """A value that a reward function logged, on one line."""
    if finite(value) is not None:
        return figure(value)
    return DASH if value is None else one_line(str(value))


def advantage_colour(value: Any) -> Any:
    """The palette's colour of an advantage: blue above zero, orange below, muted for zero or none."""
    number, colours = finite(value), theme.palette()
    if not number:
        return colours.muted
    return colours.advantage_above if number > 0 else colours.advantage_below


def reward_dot(name: str) -> QPixmap:
    return icons.dot(theme.reward_colour(name).name())


@dataclass(frozen=True, slots=True)
class CompletionLine:
    """A line of the table: a prompt (`completion` is None) or one of its completions."""

    group: int  # from 0 among the rows shown
    row: Mapping[str, Any]
    completion: Mapping[str, Any] | None = None
    offset: int = -1  # of the row in completions.jsonl, −1 outside such a file
    place: int = -1  # of the completion in the row


def lines_of_row(group: int, row: Mapping[str, Any], offset: int = -1) -> list[CompletionLine]:
    completions = enumerate(listed_completions(row))
    lines = [CompletionLine(group, row, item, offset, place) for place, item in completions]
    return [CompletionLine(group, row, None, offset), *lines]


@dataclass(frozen=True, slots=True)
class CompletionColumn:
    """`name` is the metric of a score or the name of a logged value; `sort_key` a column of the facts."""

    kind: Literal["text", "prompt", "score", "step", "reward", "advantage", "logged", "tokens", "end"]
    title: str
    sort_key: str = ""
    tip: str = ""
    name: str = ""
    is_figure: bool = True


REWARD_TIP = "The weighted sum of the scores; beside a prompt, the mean of its completions."
ADVANTAGE_TIP = "How much better than its group: above zero it becomes more likely, below zero less."
AFTER = (CompletionColumn("tokens", "Tokens", "tokens"), CompletionColumn("end", "End", is_figure=False))
"""Columns at the end that a narrow table hides: the detail has them too."""


class CompletionModel(RowsModel):
    """CompletionLines as rows.

    Columns: the text, the prompt where there are several steps, a score for each reward function, the step, reward,
    advantage, what functions logged, tokens, stop reason.
    """

    rows: Sequence[CompletionLine]
    columns: list[CompletionColumn]

    def __init__(self, parent: QObject | None = None, *, is_brief: bool = False) -> None:
        super().__init__(parent)
        self.is_brief = is_brief  # the headers of scores are dots, with their text in the tool tip
        self._max_scores: Mapping[str, float] = {}
        self._fonts = theme.mono_font(), theme.figures_font()  # making them for every cell is slow
        self.right: tuple[str, float] | None = None  # (reward function, score) of a right completion
        self.set_columns([], [])

    def set_columns(
        self,
        rewards: Sequence[str],
        labels: Sequence[str],
        weights: Sequence[float] = (),
        logged: Mapping[str, bool] | None = None,
        *,
        has_steps: bool = False,
    ) -> None:
        """Set the functions' metric names, their headers and weights, and what they `logged` (name → is a number).

        `has_steps`: the completions of several steps are shown, without their prompts.
        """
        self.beginResetModel()
        self.rows, self.rewards, self.logged, self.is_flat = [], list(rewards), dict(logged or {}), has_steps
        self.columns = [CompletionColumn("text", "Completion", is_figure=False)]
        self.columns += [CompletionColumn("prompt", "Prompt", is_figure=False)] if has_steps else []
        for i, (name, label) in enumerate(zip(rewards, labels, strict=True)):
            first, _, rest = label.partition(" ")
            below = f"{shorten(rest)}{f' × {weights[i]:g}' if weights else ''}".strip()
            title = "\n".join(filter(None, (shorten(first), below)))
            self.columns.append(CompletionColumn("score", title, f"score:{name}", name, name))
        self.columns += [CompletionColumn("step", "Step", "step")] if has_steps else []
        if rewards:
            self.columns.append(CompletionColumn("reward", "Reward", "reward", REWARD_TIP))
            self.columns.append(CompletionColumn("advantage", "Advantage", "advantage", ADVANTAGE_TIP))
        for name, is_number in self.logged.items():
            if name.endswith(EXPLANATION):  # a tip of its score
                continue
            key, tip = f"logged:{name}" if is_number else "", f"{name}, as logged."
            self.columns.append(CompletionColumn("logged", name, key, tip, name, is_number))
        self.columns += AFTER
        self.endResetModel()

    def show_lines(self, lines: Sequence[CompletionLine], max_scores: Mapping[str, float] | None = None) -> None:
        """Show these lines. `max_scores`: each function's largest score by magnitude, for the bars."""
        self.beginResetModel()
        self.rows = lines
        if max_scores is None:
            scores = [scores_of(line.completion) for line in lines if line.completion is not None]
            max_scores = {
                name: max((abs(finite(each.get(name)) or 0.0) for each in scores), default=0.0) for name in self.rewards
            }
        self._max_scores = max_scores
        self.endResetModel()

    def extend(self, lines: Sequence[CompletionLine]) -> None:
        if len(lines) > len(self.rows):
            self.beginInsertRows(QModelIndex(), len(self.rows), len(lines) - 1)
            self.rows = lines
            self.endInsertRows()

    def show_groups(self, rows: Sequence[Mapping[str, Any]], rewards: Sequence[str], labels: Sequence[str]) -> None:
        self.set_columns(rewards, labels)
        self.show_lines([line for group, row in enumerate(rows) for line in lines_of_row(group, row)])

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = ROLE.DisplayRole) -> Any:
        if orientation == Qt.Orientation.Horizontal and self.columns[section].kind == "score":
            if role == ROLE.DecorationRole:
                return reward_dot(self.columns[section].name)
            if self.is_brief and role in (ROLE.DisplayRole, ROLE.ToolTipRole, ROLE.AccessibleTextRole):
                return "" if role == ROLE.DisplayRole else " ".join(self.columns[section].title.split())
        return super().headerData(section, orientation, role)

    def text(self, row: CompletionLine, column: int) -> str:
        about, completion = self.columns[column], row.completion
        if completion is None:
            if about.kind == "text":
                answer = row.row.get("answer")
                suffix = f"   answer {one_line(str(answer))}" if answer not in (None, "") else ""
                return f"{one_line(row.row.get('prompt'))}{suffix}"
            rewards = [finite(each.get("reward")) for each in listed_completions(row.row)]
            numbers = [reward for reward in rewards if reward is not None]
            return figure(sum(numbers) / len(numbers) if numbers else None) if about.kind == "reward" else ""
        match about.kind:
            case "text":
                mark = turns_mark(completion)
                return f"{mark} · {one_line(completion.get('text'))}" if mark else one_line(completion.get("text"))
            case "prompt":
                return one_line(row.row.get("prompt"))
            case "score":
                return figure(scores_of(completion).get(about.name))
            case "logged":
                return logged_text(logged_of(completion).get(about.name))
            case "advantage":
                return signed(completion.get("advantage"))
            case "tokens":
                return figure(policy_tokens(completion))
            case "end":
                return STOP_LABELS.get(str(completion.get("stop")), str(completion.get("stop") or DASH))
            case "step":
                return figure(row.row.get("step"))
        return figure(completion.get("reward"))

    def colour(self, row: CompletionLine, column: int) -> Any:
        colours, about, completion = theme.palette(), self.columns[column], row.completion
        if completion is None:
            return colours.text if about.kind == "text" else colours.muted
        if about.kind == "score":
            score = finite(scores_of(completion).get(about.name))
            if self.right is not None and about.name == self.right[0] and (score or 0) >= self.right[1]:
                return colours.good
            return colours.text if score else colours.muted
        if about.kind == "advantage":
            return advantage_colour(completion.get("advantage"))
        if about.kind == "end" and completion.get("stop") == "length":
            return colours.warning
        return colours.text if about.kind in ("text", "reward", "logged") else colours.muted

    def font(self, row: CompletionLine, column: int) -> QFont:
        return self._fonts[self.columns[column].kind not in ("text", "prompt")]

    def tip(self, row: CompletionLine, column: int) -> str | None:
        about = self.columns[column]
        is_text = about.kind in ("logged", "prompt") and not about.is_figure
        if about.kind == "score" and row.completion is not None:
            return plain_tip(fill(visible(explanation_of(row.completion, about.name)), TIP_CHARS)) or None
        is_cut = about.kind == "text" if row.completion is None else is_text
        return plain_tip(self.text(row, column)) if is_cut else None

    def extra(self, row: CompletionLine, index: Index, role: int) -> Any:
        column = self.columns[index.column()]
        if role == ROLE.BackgroundRole and row.completion is None:
            return theme.palette().window
        if role == BAR_ROLE and column.kind == "score" and row.completion is not None:
            largest, score = self._max_scores.get(column.name), finite(scores_of(row.completion).get(column.name))
            return (score / largest, theme.reward_colour(column.name)) if largest and score else None
        return None


def draw_bar(painter: QPainter, rect: QRect, bar: tuple[float, QColor]) -> None:
    width = max(2, round((rect.width() - 2 * CELL_PADDING) * abs(bar[0])))
    # Aligned with the right-aligned score. QRect.right() is the last pixel inside the cell, hence the + 1.
    painter.fillRect(QRect(rect.right() - CELL_PADDING - width + 1, rect.bottom() - 4, width, 2), bar[1])


class CompletionTable(BaseTable):
    chosen = Signal(object, object)  # row of completions.jsonl, completion or None
    picked = Signal()  # the selected lines changed
    sort_requested = Signal(str, bool)  # column of the facts ("": the order of the file), descending
    touched = Signal()  # mouse button or key

    def __init__(self, model: CompletionModel) -> None:
        super().__init__(name="Completions")
        self._completions = model
        self._min_text_width = theme.scaled(BRIEF_TEXT_WIDTH if model.is_brief else MIN_TEXT_WIDTH)
        self._sorted = ("", True)
        self.setModel(model)
        self.setItemDelegate(CellDelegate(BAR_ROLE, draw_bar, self))
        header = self.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        header.setMinimumSectionSize(48)
        header.sectionClicked.connect(self._cycle_sorting)
        self.selectionModel().currentRowChanged.connect(self._emit_chosen)
        self.selectionModel().selectionChanged.connect(self.picked)

    def show_sorting(self, key: str, *, descending: bool) -> None:
        """Mark the header of the column that the lines are sorted by; "" marks none."""
        self._sorted = (key, descending)
        columns = enumerate(self._completions.columns) if key else ()
        at = next((at for at, column in columns if column.sort_key == key), -1)
        order = Qt.SortOrder.DescendingOrder if descending else Qt.SortOrder.AscendingOrder
        self.horizontalHeader().setSortIndicatorShown(at >= 0)
        self.horizontalHeader().setSortIndicator(at, order)

    def _cycle_sorting(self, column: int) -> None:
        if key := self._completions.columns[column].sort_key:
            following = {(key, True): (key, False), (key, False): ("", True)}
            self.sort_requested.emit(*following.get(self._sorted, (key, True)))

    def _emit_chosen(self) -> None:
        if (line := self.current_line) is not None:
            self.chosen.emit(line.row, line.completion)

    @property
    def current_line(self) -> CompletionLine | None:
        row = self.currentIndex().row()
        return self._completions.rows[row] if 0 <= row < self._completions.rowCount() else None

    @property
    def selected_lines(self) -> list[CompletionLine]:
        lines = [self._completions.rows[row] for row in self.selected_rows()]
        return [line for line in lines if line.completion is not None]

    def reset_view(self) -> None:
        self.clearSpans()  # Qt keeps spans by row number, also through a model reset
        model = self._completions
        # A flat list has no prompts, and reads a line from the file only to be shown.
        for row, line in enumerate([] if model.is_flat else model.rows):
            if line.completion is None and model.rewards:
                self.setSpan(row, 0, 1, 1 + len(model.rewards))
        self.fit_columns()
        first = next((row for row, line in enumerate(model.rows) if line.completion is not None), None)
        if first is not None:
            self.selectRow(first)
        self.scrollToTop()  # selecting scrolled to the completion, and hid its prompt in the line above

    def mousePressEvent(self, event: QMouseEvent) -> None:
        super().mousePressEvent(event)
        self.touched.emit()  # after the view has handled the event: the current line is the new one already

    def keyPressEvent(self, event: QKeyEvent) -> None:
        super().keyPressEvent(event)
        self.touched.emit()

    def fit_columns(self) -> None:
        metrics = self.horizontalHeader().fontMetrics()
        widths: dict[int, int] = {}
        for at, column in enumerate(self._completions.columns[1:], 1):
            header = self._completions.headerData(at, Qt.Orientation.Horizontal)
            dot = theme.scaled(DOT_WIDTH) if column.kind == "score" else 0
            needed = max(map(metrics.horizontalAdvance, header.split("\n"))) + dot + 2 * CELL_PADDING + 2
            is_text = column.kind == "logged" and not column.is_figure
            least = LOGGED_TEXT_WIDTH if is_text else MIN_FIGURE_WIDTH
            if dot and self._completions.is_brief:
                least, scores = BRIEF_WIDTH, (self._completions.text(line, at) for line in self._completions.rows)
                needed = self.fontMetrics().horizontalAdvance(max(scores, key=len, default="")) + 2 * CELL_PADDING + 1
            widths[at] = max(theme.scaled(least), min(theme.scaled(MAX_FIGURE_WIDTH), needed))
            if column.kind == "prompt":
                widths[at] = max(theme.scaled(LOGGED_TEXT_WIDTH), self.viewport().width() // 7)
        available = self.viewport().width()
        is_narrow = available - sum(widths.values()) < self._min_text_width
        used = 0
        for at, width in widths.items():
            hidden = is_narrow and at >= len(self._completions.columns) - len(AFTER)
            self.setColumnWidth(at, width)
            self.setColumnHidden(at, hidden)
            used += 0 if hidden else width
        # Not a Stretch section: it would shrink to the minimum section size where the table should scroll sideways.
        self.setColumnWidth(0, max(self._min_text_width, available - used))
