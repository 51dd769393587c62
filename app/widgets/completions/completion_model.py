"""The model behind tables of completions: groups under their prompts, or completions from anywhere in a run one below the other.

The input is rows of completions.jsonl, read as they are: what is missing or of the wrong type is shown as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPixmap

from app import theme
from app.widgets.basic.labels import plain_tip
from app.widgets.basic.number_format import DASH, figure, finite, signed
from backend.runs.completion_rows import token_count
from backend.utils.text import visible

# What a cell about a completion shows: texts on one line, labels, colours and dots.

RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
STOP_LABELS = {"eos": "ended", "string": "stop text", "length": "cut off"}
"""Stop reason of a completion → its label."""
_PREVIEW_CHARS = 400
"""Leading characters of a completion that its line is made from."""


def one_line(text: Any) -> str:
    """The beginning of a text on one line, line breaks replaced by spaces and other control characters escaped."""
    return visible(" ".join(text[:_PREVIEW_CHARS].split())) if isinstance(text, str) else DASH


def logged_text(value: Any) -> str:
    """A value that a reward function logged, on one line."""
    if isinstance(value, str):
        return one_line(value)
    if finite(value) is not None:
        return figure(value)
    return DASH if value is None else one_line(str(value))


def prompt_line(row: Mapping[str, Any]) -> str:
    """A row's prompt on one line, with its answer where it has one."""
    answer = row.get("answer")
    suffix = f"   answer {one_line(str(answer))}" if answer not in (None, "") else ""
    return f"{one_line(row.get('prompt'))}{suffix}"


def advantage_colour(value: Any) -> Any:
    """The palette's colour of an advantage: blue above zero, orange below, muted for zero or none."""
    number, colours = finite(value), theme.palette()
    if not number:
        return colours.muted
    return colours.advantage_above if number > 0 else colours.advantage_below


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


# ── completion model ─────────────────────────────────────────────────────────────────────────────────────────────────

Index = QModelIndex | QPersistentModelIndex
BAR_ROLE = Qt.ItemDataRole.UserRole
"""Item role: (length −1 to 1, colour) of the bar under a score."""
TIPS = {
    "Reward": "The sum of the scores, each times its weight; beside a prompt, the mean of its completions.",
    "Advantage": "How much better than its group: above zero it is made more likely, below zero less.",
}
_HEADER_CHARS = 14
"""Characters of a header's line that the widest column has room for."""
_SORT_KEYS = {"Reward": "reward", "Advantage": "advantage", "Tokens": "tokens", "Step": "step"}


@dataclass(frozen=True, slots=True)
class CompletionLine:
    """A line of the table: a prompt (`completion` is None) or one of its completions. `group` counts from 0 among the rows shown;
    `offset` and `place` say where in completions.jsonl the row and in the row the completion is, −1 for what is in no such file."""

    group: int
    row: Mapping[str, Any]
    completion: Mapping[str, Any] | None = None
    offset: int = -1
    place: int = -1


class CompletionModel(QAbstractTableModel):
    """Columns: the text, a score for each reward function, reward, advantage, what functions logged, tokens, stop reason; and the step,
    where completions of several steps are shown.

    Attributes:
        lines – the table's lines, in order.
        rewards – metric names of the reward functions, in the order of their columns.
        is_flat – whether completions stand without their prompts.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.lines: Sequence[CompletionLine] = []
        self.rewards: list[str] = []
        self.is_flat = False
        self._count = 0
        self._logged: dict[str, bool] = {}
        self._logged_at: dict[int, str] = {}
        self._headers = ["Completion", "Reward", "Advantage", "Tokens", "End"]
        self._max_scores: Mapping[str, float] = {}
        self._fonts = theme.mono_font(), theme.figures_font()  # made for every cell they took a fifth of a painting
        theme.signals.changed.connect(self._recolour)

    def set_columns(
        self,
        rewards: Sequence[str],
        labels: Sequence[str],
        weights: Sequence[float] = (),
        logged: Mapping[str, bool] | None = None,
        *,
        has_steps: bool = False,
    ) -> None:
        """`rewards` are the functions' metric names, `labels` their headers, `weights` what stands below these; `logged` names what
        functions logged, and whether it is numbers. Call it before showing lines."""
        self.beginResetModel()
        self.rewards, self._logged, self.is_flat = list(rewards), dict(logged or {}), has_steps
        self.lines, self._count = [], 0
        shown_weights = [f" × {weight:g}" for weight in weights] or [""] * len(labels)
        heads = [_two_lines(text, weight) for text, weight in zip(labels, shown_weights, strict=True)]
        steps = ["Step"] if has_steps else []
        before = ["Completion", *heads, *steps, "Reward", "Advantage"]
        self._headers = [*before, *self._logged, "Tokens", "End"]
        # By place: a function may log under any name, "Reward" too.
        self._logged_at = dict(enumerate(self._logged, len(before)))
        self.endResetModel()

    @property
    def logged(self) -> dict[str, bool]:
        """The names of the columns that functions logged, and whether each is numbers."""
        return self._logged

    def show_lines(self, lines: Sequence[CompletionLine], max_scores: Mapping[str, float] | None = None) -> None:
        """Show these lines. `max_scores`, each function's largest score by magnitude, are worked out from them if left out: scores of
        different functions are on different scales, so one scale would hide the small ones' bars."""
        self.beginResetModel()
        self.lines, self._count = lines, len(lines)
        self._max_scores = _largest(lines, self.rewards) if max_scores is None else max_scores
        self.endResetModel()

    def extend(self, lines: Sequence[CompletionLine]) -> None:
        """Show these lines, which begin with those that are shown."""
        if len(lines) > self._count:
            self.beginInsertRows(QModelIndex(), self._count, len(lines) - 1)
            self.lines, self._count = lines, len(lines)
            self.endInsertRows()

    def show_groups(self, rows: Sequence[Mapping[str, Any]], rewards: Sequence[str], labels: Sequence[str]) -> None:
        """Show whole rows, each under its prompt."""
        self.set_columns(rewards, labels)
        self.show_lines([line for group, row in enumerate(rows) for line in lines_of_row(group, row)])

    def sort_key(self, column: int) -> str:
        """The name of a column among the facts of completions; "" for one that cannot be sorted by."""
        if 0 < column <= len(self.rewards):
            return f"score:{self.rewards[column - 1]}"
        if (logged := self._logged_at.get(column)) is not None:
            return f"logged:{logged}" if self._logged[logged] else ""
        return _SORT_KEYS.get(self._headers[column], "")

    def _recolour(self) -> None:
        self._fonts = theme.mono_font(), theme.figures_font()
        if self._count:
            self.dataChanged.emit(self.index(0, 0), self.index(self._count - 1, self.columnCount() - 1))

    # ── what Qt asks ────────────────────────────────────────────────────────────────────────────

    def rowCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else self._count

    def columnCount(self, parent: Index = QModelIndex()) -> int:
        return 0 if parent.isValid() else len(self._headers)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self._headers[section]
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(self._tip(section) or "")
        if role == Qt.ItemDataRole.DecorationRole and 0 < section <= len(self.rewards):
            return reward_dot(section - 1)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return self._alignment(section)
        return None

    def _tip(self, section: int) -> str | None:
        if 0 < section <= len(self.rewards):
            return self.rewards[section - 1]
        header = self._headers[section]
        return f"{header}, as a reward function logged it." if section in self._logged_at else TIPS.get(header)

    def _alignment(self, column: int) -> Qt.AlignmentFlag:
        return LEFT if self.is_text(column) else RIGHT

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        line, column = self.lines[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(line, column)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(str(self._text(line, column))) if self._is_cut(line, column) else None
        if role == Qt.ItemDataRole.ForegroundRole:
            return self._colour(line, column)
        if role == Qt.ItemDataRole.BackgroundRole:
            return theme.palette().window if line.completion is None else None
        if role == Qt.ItemDataRole.FontRole:
            return self._fonts[min(column, 1)]
        if role == BAR_ROLE:
            return self._bar(line, column)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return self._alignment(column)
        return None

    def _is_cut(self, line: CompletionLine, column: int) -> bool:
        """Whether a cell has more text than it may have room for: a prompt, and a text that a function logged."""
        return column == 0 if line.completion is None else self.is_text(column) and column in self._logged_at

    def is_text(self, column: int) -> bool:
        """Whether a column's values are texts."""
        is_ours = column in (0, len(self._headers) - 1)
        return is_ours or not self._logged.get(self._logged_at.get(column, ""), True)

    def _bar(self, line: CompletionLine, column: int) -> tuple[float, QColor] | None:
        """A score divided by its function's largest score (by magnitude), and the bar's colour."""
        if line.completion is None or not 0 < column <= len(self.rewards):
            return None
        name = self.rewards[column - 1]
        largest, score = self._max_scores.get(name, 0.0), score_of(line, name)
        return (score / largest, theme.reward_colour(column - 1)) if largest and score else None

    def _text(self, line: CompletionLine, column: int) -> str:
        if line.completion is None:
            return self._prompt_text(line, column)
        if column == 0:
            return one_line(line.completion.get("text"))
        if column <= len(self.rewards):
            return figure(_scores(line.completion).get(self.rewards[column - 1]))
        if (logged := self._logged_at.get(column)) is not None:
            return logged_text(logged_of(line.completion).get(logged))
        return self._text_after_scores(line, line.completion, self._headers[column])

    def _prompt_text(self, line: CompletionLine, column: int) -> str:
        if column == 0:
            return prompt_line(line.row)
        is_reward = self._headers[column] == "Reward" and column not in self._logged_at
        return figure(_mean_reward(line.row)) if is_reward else ""

    def _text_after_scores(self, line: CompletionLine, completion: Mapping[str, Any], header: str) -> str:
        if header == "Reward":
            return figure(completion.get("reward"))
        if header == "Advantage":
            return signed(completion.get("advantage"))
        if header == "Tokens":
            return figure(token_count(completion.get("tokens")))
        if header == "End":
            return STOP_LABELS.get(str(completion.get("stop")), str(completion.get("stop") or DASH))
        return figure(line.row.get("step"))

    def _colour(self, line: CompletionLine, column: int) -> Any:
        colours = theme.palette()
        if line.completion is None:
            return colours.text if column == 0 else colours.muted
        if 0 < column <= len(self.rewards):
            return colours.text if score_of(line, self.rewards[column - 1]) else colours.muted
        header = "" if column in self._logged_at else self._headers[column]
        if header == "Advantage":
            return advantage_colour(line.completion.get("advantage"))
        if header == "End" and line.completion.get("stop") == "length":
            return colours.warning
        return colours.text if header in ("Completion", "Reward", "") else colours.muted


def lines_of_row(group: int, row: Mapping[str, Any], offset: int = -1) -> list[CompletionLine]:
    """The prompt of a row, and its completions."""
    listed = row.get("completions")
    completions = [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []
    lines = [CompletionLine(group, row, item, offset, place) for place, item in enumerate(completions)]
    return [CompletionLine(group, row, None, offset), *lines]


def logged_of(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    """What reward functions logged of a completion, by name."""
    logged = completion.get("logged")
    return logged if isinstance(logged, Mapping) else {}


def score_of(line: CompletionLine, name: str) -> float | None:
    """A function's score of the line's completion; None where it has none."""
    return finite(_scores(line.completion or {}).get(name))


def _largest(lines: Sequence[CompletionLine], names: Sequence[str]) -> dict[str, float]:
    scored = [line for line in lines if line.completion is not None]
    return {name: max((abs(score_of(line, name) or 0.0) for line in scored), default=0.0) for name in names}


def _two_lines(label: str, weight: str) -> str:
    """Two lines at most, so that columns stay narrow; each is elided in the middle, as names differ at their ends as often as not."""
    first, _, second = label.partition(" ")
    lines = [_elided(first), f"{_elided(second)}{weight}".strip()]
    return "\n".join(line for line in lines if line)


def _elided(text: str) -> str:
    kept = _HEADER_CHARS // 2
    return text if len(text) <= _HEADER_CHARS else f"{text[:kept]}…{text[-kept:]}"


def _mean_reward(row: Mapping[str, Any]) -> float | None:
    """Mean reward of a prompt's completions, the group baseline of their advantages."""
    rewards = [finite(line.completion.get("reward")) for line in lines_of_row(0, row) if line.completion]
    numbers = [reward for reward in rewards if reward is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _scores(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    scores = completion.get("rewards")
    return scores if isinstance(scores, Mapping) else {}
