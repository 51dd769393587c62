"""Groups of completions as a table: a line for each prompt, below it its completions with every function's score.

The input is rows of completions.jsonl, read as they are: what is missing or of the wrong type is shown as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, QRect, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QKeyEvent, QMouseEvent, QPainter, QPixmap, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QStyledItemDelegate, QStyleOptionViewItem

from app import theme
from app.stylesheet import CELL_PADDING
from app.widgets.basic.base_table import BaseTable
from app.widgets.basic.number_format import DASH, figure, finite, signed
from backend.spec.completion_rows import token_count

Index = QModelIndex | QPersistentModelIndex
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
_MIN_FIGURE_WIDTH, _MAX_FIGURE_WIDTH, _MIN_TEXT_WIDTH = 64, 124, 220
_DOT_WIDTH = 18
"""Width of the dot in a header, with its gap."""
OPTIONAL_COLUMNS = 2
"""Columns at the end that a narrow table hides: tokens and stop reason, which the detail below the table has too."""
_PREVIEW_CHARS = 400
"""Leading characters of a completion that its line is made from."""
BAR_ROLE = Qt.ItemDataRole.UserRole
"""Item role: (length −1 to 1, colour) of the bar under a score."""
STOP_LABELS = {"eos": "ended", "string": "stop text", "length": "cut off"}
"""Stop reason of a completion → its label."""
TIPS = {
    "Reward": "The weighted sum of the scores; beside a prompt, the mean of its completions.",
    "Advantage": "How much better than its group: above zero it is made more likely, below zero less.",
}


@dataclass(frozen=True, slots=True)
class CompletionLine:
    """A line of the table: a prompt (`completion` is None) or one of its completions. `group` counts from 0."""

    group: int
    row: Mapping[str, Any]
    completion: Mapping[str, Any] | None = None


class CompletionModel(QAbstractTableModel):
    """Columns: the text, a score for each reward function, reward, advantage, tokens, stop reason.

    Attributes:
        lines – the table's lines, in order.
        rewards – metric names of the reward functions, in the order of their columns.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.lines: list[CompletionLine] = []
        self.rewards: list[str] = []
        self._headers = ["Completion", "Reward", "Advantage", "Tokens", "End"]
        self._max_scores: dict[str, float] = {}
        theme.signals.changed.connect(self._recolour)

    def show_groups(self, rows: Sequence[Mapping[str, Any]], rewards: Sequence[str], labels: Sequence[str]) -> None:
        """Show these rows of completions.jsonl; `rewards` are the functions' metric names, `labels` their headers."""
        self.beginResetModel()
        self.rewards = list(rewards)
        self._headers = ["Completion", *labels, "Reward", "Advantage", "Tokens", "End"]
        self.lines = [line for group, row in enumerate(rows) for line in _lines_of_group(group, row)]
        # Per function: scores of different functions are on different scales, so one scale would hide the small ones' bars.
        self._max_scores = {
            name: max((abs(_score(line, name) or 0.0) for line in self.lines if line.completion), default=0.0)
            for name in rewards
        }
        self.endResetModel()

    def _recolour(self) -> None:
        if self.lines:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.lines) - 1, self.columnCount() - 1))

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self.lines)

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self._headers)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self._headers[section].replace(" ", "\n", 1)  # two lines at most, so that columns stay narrow
        if role == Qt.ItemDataRole.ToolTipRole:
            return self.rewards[section - 1] if 0 < section <= len(self.rewards) else TIPS.get(self._headers[section])
        if role == Qt.ItemDataRole.DecorationRole and 0 < section <= len(self.rewards):
            return reward_dot(section - 1)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _LEFT if section in (0, len(self._headers) - 1) else _RIGHT
        return None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        line, column = self.lines[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(line, column)
        if role == Qt.ItemDataRole.ForegroundRole:
            return self._colour(line, column)
        if role == Qt.ItemDataRole.BackgroundRole:
            return theme.palette().window if line.completion is None else None
        if role == Qt.ItemDataRole.FontRole:
            return theme.mono_font() if column == 0 else theme.figures_font()
        if role == BAR_ROLE:
            return self._bar(line, column)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _LEFT if column in (0, len(self._headers) - 1) else _RIGHT
        return None

    def _bar(self, line: CompletionLine, column: int) -> tuple[float, QColor] | None:
        """A score divided by its function's largest score (by magnitude) in the table, and the bar's colour."""
        if line.completion is None or not 0 < column <= len(self.rewards):
            return None
        name = self.rewards[column - 1]
        largest, score = self._max_scores.get(name, 0.0), _score(line, name)
        return (score / largest, theme.reward_colour(column - 1)) if largest and score else None

    def _text(self, line: CompletionLine, column: int) -> str:
        if line.completion is None:
            return self._prompt_text(line, column)
        if column == 0:
            return one_line(line.completion.get("text"))
        if column <= len(self.rewards):
            return figure(_scores(line.completion).get(self.rewards[column - 1]))
        return self._text_after_scores(line.completion, self._headers[column])

    def _prompt_text(self, line: CompletionLine, column: int) -> str:
        if column == 0:
            return _prompt_line(line.row)
        return figure(_mean_reward(line.row)) if self._headers[column] == "Reward" else ""

    def _text_after_scores(self, completion: Mapping[str, Any], header: str) -> str:
        if header == "Reward":
            return figure(completion.get("reward"))
        if header == "Advantage":
            return signed(completion.get("advantage"))
        if header == "Tokens":
            return figure(token_count(completion.get("tokens")))
        return STOP_LABELS.get(str(completion.get("stop")), str(completion.get("stop") or DASH))

    def _colour(self, line: CompletionLine, column: int) -> Any:
        colours = theme.palette()
        if line.completion is None:
            return colours.text if column == 0 else colours.muted
        if 0 < column <= len(self.rewards):
            return colours.text if _score(line, self.rewards[column - 1]) else colours.muted
        header = self._headers[column]
        if header == "Advantage":
            return advantage_colour(line.completion.get("advantage"))
        if header == "End" and line.completion.get("stop") == "length":
            return colours.warning
        return colours.text if header in ("Completion", "Reward") else colours.muted


class ScoreBarDelegate(QStyledItemDelegate):
    """Paints a bar below each score, in its function's colour and as long as BAR_ROLE says."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(
            painter, option, index
        )  # text and selection first: painted later, a selection would cover the bar
        bar = index.data(BAR_ROLE)
        if bar is None:
            return
        length, colour = bar
        rect: QRect = option.rect  # pyright: ignore[reportAttributeAccessIssue]
        width = max(
            2, round((rect.width() - 2 * CELL_PADDING) * abs(length))
        )  # even the smallest score has a visible bar
        # Aligned with the right-aligned score. QRect.right() is the last pixel inside the cell, hence the + 1.
        painter.fillRect(QRect(rect.right() - CELL_PADDING - width + 1, rect.bottom() - 4, width, 2), colour)


class CompletionTable(BaseTable):
    """The table view over a CompletionModel.

    Signals:
        chosen(row of completions.jsonl, completion or None) – the current line changed.
        touched – the user pressed a mouse button or a key in the table.
    """

    chosen = Signal(object, object)
    touched = Signal()

    def __init__(
        self, model: CompletionModel, max_score_width: int = _MAX_FIGURE_WIDTH, min_text_width: int = _MIN_TEXT_WIDTH
    ) -> None:
        """`max_score_width` limits a column of scores however wide its header is; the text gets at least
        `min_text_width`. Both in pixels before scaling with the text size."""
        super().__init__()
        self._completions = model
        self._max_score_width, self._min_text_width = theme.scaled(max_score_width), theme.scaled(min_text_width)
        self.setModel(model)
        self.setItemDelegate(ScoreBarDelegate(self))
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setAccessibleName("Completions")
        header = self.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        header.setMinimumSectionSize(48)
        header.setStretchLastSection(False)
        self.selectionModel().currentRowChanged.connect(self._emit_chosen)

    def reset_view(self) -> None:
        """After `show_groups`: span the prompts over the scores, size the columns, select the first completion."""
        self.clearSpans()  # Qt keeps spans by row number, also through a model reset
        for row, line in enumerate(self._completions.lines):
            if line.completion is None and self._completions.rewards:
                self.setSpan(row, 0, 1, 1 + len(self._completions.rewards))
        self._resize_columns()
        first = next((row for row, line in enumerate(self._completions.lines) if line.completion is not None), None)
        if first is not None:
            self.selectRow(first)
        self.scrollToTop()  # selecting scrolled to the completion, and hid its prompt in the line above

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._resize_columns()

    # `touched` is emitted after the view has handled the event, when the current line is the new one already.

    def mousePressEvent(self, event: QMouseEvent) -> None:
        super().mousePressEvent(event)
        self.touched.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        super().keyPressEvent(event)
        self.touched.emit()

    def _resize_columns(self) -> None:
        """Size columns of figures by their headers; the text column gets the remaining width.

        In a narrow table the optional columns are hidden, and the text gets their width too.
        """
        widths = {column: self._figure_width(column) for column in range(1, self._completions.columnCount())}
        optional = list(widths)[-OPTIONAL_COLUMNS:]
        available = self.viewport().width()
        narrow = available - sum(widths.values()) < self._min_text_width
        for column, width in widths.items():
            self.setColumnWidth(column, width)
            self.setColumnHidden(column, narrow and column in optional)
        used = sum(width for column, width in widths.items() if not (narrow and column in optional))
        # Not a Stretch section: it would shrink to the minimum section size where the table should scroll sideways.
        self.setColumnWidth(0, max(self._min_text_width, available - used))

    def _figure_width(self, column: int) -> int:
        """Width of a column of figures: what the longer line of its header needs, within limits."""
        metrics = self.horizontalHeader().fontMetrics()
        lines = str(self._completions.headerData(column, Qt.Orientation.Horizontal)).split("\n")
        dot = theme.scaled(_DOT_WIDTH) if column <= len(self._completions.rewards) else 0
        needed = max(map(metrics.horizontalAdvance, lines)) + dot + 2 * CELL_PADDING + 2
        widest = self._max_score_width if dot else theme.scaled(_MAX_FIGURE_WIDTH)
        return max(min(theme.scaled(_MIN_FIGURE_WIDTH), widest), min(widest, needed))

    def _emit_chosen(self, current: QModelIndex, _previous: QModelIndex) -> None:
        if current.isValid() and current.row() < len(self._completions.lines):
            line = self._completions.lines[current.row()]
            self.chosen.emit(line.row, line.completion)


def one_line(text: Any) -> str:
    """The beginning of a text on one line, line breaks replaced by spaces."""
    return " ".join(text[:_PREVIEW_CHARS].split()) if isinstance(text, str) else DASH


def advantage_colour(value: Any) -> Any:
    """The palette's colour of an advantage: blue above zero, orange below, muted for zero or none."""
    number, colours = finite(value), theme.palette()
    if not number:
        return colours.muted
    return colours.advantage_above if number > 0 else colours.advantage_below


def _lines_of_group(group: int, row: Mapping[str, Any]) -> list[CompletionLine]:
    listed = row.get("completions")
    completions = [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []
    return [CompletionLine(group, row), *(CompletionLine(group, row, completion) for completion in completions)]


def _mean_reward(row: Mapping[str, Any]) -> float | None:
    """Mean reward of a prompt's completions, the group baseline of their advantages."""
    rewards = [finite(line.completion.get("reward")) for line in _lines_of_group(0, row) if line.completion]
    numbers = [reward for reward in rewards if reward is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _score(line: CompletionLine, name: str) -> float | None:
    return finite(_scores(line.completion or {}).get(name))


def reward_dot(index: int) -> QPixmap:
    """A dot in the colour of reward function `index`."""
    return _dot(theme.reward_colour(index).name())


@cache
def _dot(colour: str) -> QPixmap:
    pixmap = QPixmap(16, 16)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(QColor(colour))
    painter.drawEllipse(QRectF(2, 2, 12, 12))
    painter.end()
    pixmap.setDevicePixelRatio(2)  # 8 logical pixels, sharp on a high-DPI screen too
    return pixmap


def _scores(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    scores = completion.get("rewards")
    return scores if isinstance(scores, Mapping) else {}


def _prompt_line(row: Mapping[str, Any]) -> str:
    answer = row.get("answer")
    suffix = f"   answer {one_line(str(answer))}" if answer not in (None, "") else ""
    return f"{one_line(row.get('prompt'))}{suffix}"
