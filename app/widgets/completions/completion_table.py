"""Groups of completions as a table: a line for each prompt, below it its completions with every score in its colour.

A row as completions.jsonl has it goes in; what is missing or of the wrong type shows as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, QRect, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QKeyEvent, QMouseEvent, QPainter, QPixmap
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QStyledItemDelegate, QStyleOptionViewItem

from app import theme
from app.stylesheet import CELL_PADDING
from app.widgets.basic.base_table import BaseTable
from app.widgets.basic.number_format import DASH, figure, finite, signed

Index = QModelIndex | QPersistentModelIndex
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
_FIGURE_LEAST, _FIGURE_MOST, _TEXT_LEAST = 64, 124, 220
_DOT = 18
"""What the dot in a heading takes."""
OPTIONAL_COLUMNS = 2
"""Columns at the end that a narrow table does without: tokens and the way it ended, which stand below it too."""
_PREVIEW = 400
"""Characters of a completion that its line looks at."""
BAR_ROLE = Qt.ItemDataRole.UserRole
"""Item role: the length and colour of a score's bar."""
STOP_LABELS = {"eos": "ended", "stop": "stop text", "length": "cut off"}
"""Why a completion ended → as people read it."""
TIPS = {
    "Reward": "The weighted sum of the scores; beside a prompt, the mean of its completions.",
    "Advantage": "How much better than its group: above zero it is made more likely, below zero less.",
}


@dataclass(frozen=True, slots=True)
class CompletionLine:
    """A line of the table: a prompt (`completion` None) or one of its completions."""

    group: int
    row: Mapping[str, Any]
    completion: Mapping[str, Any] | None = None


class CompletionModel(QAbstractTableModel):
    """Columns: the text, one per reward function, the reward, the advantage, tokens, how it ended."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.lines: list[CompletionLine] = []
        self.rewards: list[str] = []
        self._heads = ["Completion", "Reward", "Advantage", "Tokens", "End"]
        self._greatest: dict[str, float] = {}
        theme.signals.changed.connect(self._recolour)

    def show_groups(self, rows: Sequence[Mapping[str, Any]], rewards: Sequence[str], labels: Sequence[str]) -> None:
        self.beginResetModel()
        self.rewards = list(rewards)
        self._heads = ["Completion", *labels, "Reward", "Advantage", "Tokens", "End"]
        self.lines = [line for place, row in enumerate(rows) for line in _lines_of_group(place, row)]
        self._greatest = {
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
        return 0 if parent.isValid() else len(self._heads)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self._heads[section].replace(" ", "\n", 1)
        if role == Qt.ItemDataRole.ToolTipRole:
            return self.rewards[section - 1] if 0 < section <= len(self.rewards) else TIPS.get(self._heads[section])
        if role == Qt.ItemDataRole.DecorationRole and 0 < section <= len(self.rewards):
            return reward_dot(section - 1)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _LEFT if section in (0, len(self._heads) - 1) else _RIGHT
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
            return self._share(line, column)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _LEFT if column in (0, len(self._heads) - 1) else _RIGHT
        return None

    def _share(self, line: CompletionLine, column: int) -> tuple[float, QColor] | None:
        """How much of its function's greatest score (of those shown) a score is, −1 to 1, and the bar's colour."""
        if line.completion is None or not 0 < column <= len(self.rewards):
            return None
        name = self.rewards[column - 1]
        greatest, score = self._greatest.get(name, 0.0), _score(line, name)
        return (score / greatest, theme.reward_colour(column - 1)) if greatest and score else None

    def _text(self, line: CompletionLine, column: int) -> str:
        if line.completion is None:
            return self._text_of_prompt(line, column)
        if column == 0:
            return one_line(line.completion.get("text"))
        if column <= len(self.rewards):
            return figure(_scores(line.completion).get(self.rewards[column - 1]))
        return self._text_after_scores(line.completion, self._heads[column])

    def _text_of_prompt(self, line: CompletionLine, column: int) -> str:
        if column == 0:
            return _prompt_line(line.row)
        return figure(_mean_reward(line.row)) if self._heads[column] == "Reward" else ""

    def _text_after_scores(self, one: Mapping[str, Any], head: str) -> str:
        if head == "Reward":
            return figure(one.get("reward"))
        if head == "Advantage":
            return signed(one.get("advantage"))
        if head == "Tokens":
            return figure(token_count(one))
        return STOP_LABELS.get(str(one.get("stop")), str(one.get("stop") or DASH))

    def _colour(self, line: CompletionLine, column: int) -> Any:
        colours = theme.palette()
        if line.completion is None:
            return colours.text if column == 0 else colours.muted
        if 0 < column <= len(self.rewards):
            return colours.text if _score(line, self.rewards[column - 1]) else colours.muted
        head = self._heads[column]
        if head == "Advantage":
            return advantage_colour(line.completion.get("advantage"))
        if head == "End" and line.completion.get("stop") == "length":
            return colours.warning
        return colours.text if head in ("Completion", "Reward") else colours.muted


class ScoreBarDelegate(QStyledItemDelegate):
    """A figure, and under it a bar in the colour of its reward function: as long as the score is good."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, option, index)
        found = index.data(BAR_ROLE)
        if found is None:
            return
        share, colour = found
        rect: QRect = option.rect  # pyright: ignore[reportAttributeAccessIssue]
        room = rect.width() - 2 * CELL_PADDING
        width = max(2, round(room * abs(share)))
        painter.fillRect(QRect(rect.right() - CELL_PADDING - width + 1, rect.bottom() - 4, width, 2), colour)


class CompletionTable(BaseTable):
    """The table.

    Signals: chosen(row of completions.jsonl, completion or None) – a line was selected; touched – by a person.
    """

    chosen = Signal(object, object)
    touched = Signal()

    def __init__(self, model: CompletionModel, widest: int = _FIGURE_MOST, least_text: int = _TEXT_LEAST) -> None:
        """`widest`: most pixels that a column of scores takes, whatever its heading would like; `least_text`: fewest that
        the text is left with."""
        super().__init__()
        self._lines = model
        self._widest, self._least_text = theme.scaled(widest), theme.scaled(least_text)
        self.setModel(model)
        self.setItemDelegate(ScoreBarDelegate(self))
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setAccessibleName("Completions")
        head = self.horizontalHeader()
        head.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        head.setMinimumSectionSize(48)
        head.setStretchLastSection(False)
        self.selectionModel().currentRowChanged.connect(self._choose)

    def reset_view(self) -> None:
        """After other groups are shown: prompts across the scores, columns to fit, the first completion selected."""
        self.clearSpans()
        for row, line in enumerate(self._lines.lines):
            if line.completion is None and self._lines.rewards:
                self.setSpan(row, 0, 1, 1 + len(self._lines.rewards))
        self._fit()
        first = next((row for row, line in enumerate(self._lines.lines) if line.completion is not None), None)
        if first is not None:
            self.selectRow(first)
        self.scrollToTop()  # its prompt stands above it

    def resizeEvent(self, event: Any) -> None:
        super().resizeEvent(event)
        self._fit()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        super().mousePressEvent(event)
        self.touched.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        super().keyPressEvent(event)
        self.touched.emit()

    def _fit(self) -> None:
        """Figures get what their heading needs; the text gets the rest, and in a narrow table the last columns' room."""
        widths = {column: self._needed(column) for column in range(1, self._lines.columnCount())}
        spared = list(widths)[-OPTIONAL_COLUMNS:]
        room = self.viewport().width()
        narrow = room - sum(widths.values()) < self._least_text
        for column, width in widths.items():
            self.setColumnWidth(column, width)
            self.setColumnHidden(column, narrow and column in spared)
        taken = sum(width for column, width in widths.items() if not (narrow and column in spared))
        self.setColumnWidth(0, max(self._least_text, room - taken))

    def _needed(self, column: int) -> int:
        """Width of a column of figures."""
        metrics = self.horizontalHeader().fontMetrics()
        words = str(self._lines.headerData(column, Qt.Orientation.Horizontal)).split("\n")
        dot = theme.scaled(_DOT) if column <= len(self._lines.rewards) else 0
        wanted = max(map(metrics.horizontalAdvance, words)) + dot + 2 * CELL_PADDING + 2
        widest = self._widest if dot else theme.scaled(_FIGURE_MOST)
        return max(min(theme.scaled(_FIGURE_LEAST), widest), min(widest, wanted))

    def _choose(self, now: QModelIndex, _before: QModelIndex) -> None:
        if now.isValid() and now.row() < len(self._lines.lines):
            line = self._lines.lines[now.row()]
            self.chosen.emit(line.row, line.completion)


def one_line(text: Any) -> str:
    """The beginning of a text on one line; breaks become spaces."""
    return " ".join(text[:_PREVIEW].split()) if isinstance(text, str) else DASH


def token_count(one: Mapping[str, Any]) -> int | None:
    """Tokens of a completion, whether they were counted or listed."""
    tokens = one.get("tokens")
    return len(tokens) if isinstance(tokens, list) else tokens if isinstance(tokens, int) else None


def advantage_colour(value: Any) -> Any:
    """Blue above zero, orange below."""
    number, colours = finite(value), theme.palette()
    if not number:
        return colours.muted
    return colours.advantage_above if number > 0 else colours.advantage_below


def _lines_of_group(place: int, row: Mapping[str, Any]) -> list[CompletionLine]:
    completions = row.get("completions")
    found = [one for one in completions if isinstance(one, Mapping)] if isinstance(completions, list) else []
    return [CompletionLine(place, row), *(CompletionLine(place, row, one) for one in found)]


def _mean_reward(row: Mapping[str, Any]) -> float | None:
    """What the completions of a prompt got on average: an advantage is a distance from it."""
    rewards = [finite(line.completion.get("reward")) for line in _lines_of_group(0, row) if line.completion]
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None


def _score(line: CompletionLine, name: str) -> float | None:
    return finite(_scores(line.completion or {}).get(name))


def reward_dot(place: int) -> QPixmap:
    """A dot in the colour of the reward function at this place."""
    return _dot(theme.reward_colour(place).name())


@cache
def _dot(colour: str) -> QPixmap:
    picture = QPixmap(16, 16)
    picture.fill(Qt.GlobalColor.transparent)
    painter = QPainter(picture)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(QColor(colour))
    painter.drawEllipse(QRectF(2, 2, 12, 12))
    painter.end()
    picture.setDevicePixelRatio(2)
    return picture


def _scores(one: Mapping[str, Any]) -> Mapping[str, Any]:
    scores = one.get("rewards")
    return scores if isinstance(scores, Mapping) else {}


def _prompt_line(row: Mapping[str, Any]) -> str:
    answer = row.get("answer")
    known = f"   answer {one_line(str(answer))}" if answer not in (None, "") else ""
    return f"{one_line(row.get('prompt'))}{known}"
