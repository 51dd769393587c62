"""One completion in full: the prompt, the text as the model wrote it, and what each reward function gave for it."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QSyntaxHighlighter
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPlainTextEdit, QSplitter, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import label
from app.widgets.basic.number_format import figure, signed
from app.widgets.completions.completion_table import STOP_LABELS, advantage_colour, token_count


class CompletionDetail(QFrame):
    """Prompt at the left, completion at the right, scores above it; or, `upright`, one above the other."""

    def __init__(self, parent: QWidget | None = None, *, upright: bool = False) -> None:
        super().__init__(parent)
        self._names: Sequence[str] = ()
        self._labels: Sequence[str] = ()
        self._shown: tuple[Mapping[str, Any], Mapping[str, Any] | None] | None = None
        self.setProperty("role", "card")
        self.prompt, self.text = _pane(), _pane()
        self.prompt.setAccessibleName("Prompt")
        self.text.setAccessibleName("Completion")
        self._tags = [TagHighlighter(pane) for pane in (self.prompt, self.text)]
        self._answer, self._came_to, self._scores = _line(), _line(), _line()
        sides = self._sides = QSplitter(childrenCollapsible=False, handleWidth=2 * theme.SPACE)
        self.set_upright(upright)
        sides.addWidget(_side("Prompt", self._answer, None, self.prompt))
        sides.addWidget(_side("Completion", self._came_to, self._scores, self.text))
        sides.setStretchFactor(0, 2)
        sides.setStretchFactor(1, 3)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 10, 12, 12)
        row.addWidget(sides)
        theme.signals.changed.connect(self._again)

    def set_upright(self, upright: bool) -> None:
        self._sides.setOrientation(Qt.Orientation.Vertical if upright else Qt.Orientation.Horizontal)

    def set_rewards(self, names: Sequence[str], labels: Sequence[str]) -> None:
        """The reward functions, whose places are their colours."""
        self._names, self._labels = names, labels

    def show_completion(self, row: Mapping[str, Any], completion: Mapping[str, Any] | None) -> None:
        """`completion` None shows the prompt alone."""
        self._shown = (row, completion)
        answer = row.get("answer")
        self._answer.setText(f"Answer: {html.escape(str(answer))}" if answer not in (None, "") else "")
        _put(self.prompt, row.get("prompt"))
        _put(self.text, (completion or {}).get("text"))
        self._came_to.setText(_came_to(completion) if completion else "")
        self._scores.setText(self._told(completion) if completion else "")

    def _again(self) -> None:
        for tags in self._tags:
            tags.rehighlight()
        if self._shown is not None:
            self.show_completion(*self._shown)

    def _told(self, one: Mapping[str, Any]) -> str:
        scores = one.get("rewards")
        scores = scores if isinstance(scores, Mapping) else {}
        parts = [
            f'<span style="color:{theme.reward_colour(place).name()}">●</span> {html.escape(short)} {figure(scores.get(name))}'
            for place, (name, short) in enumerate(zip(self._names, self._labels, strict=True))
        ]
        return _unbroken(parts)


class TagHighlighter(QSyntaxHighlighter):
    """Colours what stands in angle brackets, so that the parts of an answer can be told apart at a glance."""

    _TAG = re.compile(r"</?[A-Za-z|][^<>\s]{0,40}>")

    def __init__(self, pane: QPlainTextEdit) -> None:
        super().__init__(pane.document())

    def highlightBlock(self, text: str) -> None:
        for tag in self._TAG.finditer(text):
            self.setFormat(tag.start(), tag.end() - tag.start(), theme.palette().accent)


def _came_to(one: Mapping[str, Any]) -> str:
    """Reward, advantage and length of a completion."""
    advantage = one.get("advantage")
    return _unbroken(
        [
            f"<b>Reward {figure(one.get('reward'))}</b>",
            f'<span style="color:{advantage_colour(advantage).name()}">Advantage {signed(advantage)}</span>',
            f"{figure(token_count(one))} tokens, {STOP_LABELS.get(str(one.get('stop')), str(one.get('stop')))}",
        ]
    )


def _unbroken(parts: Sequence[str]) -> str:
    """Parts that a line may break between, and nowhere else."""
    return " &nbsp;&nbsp; ".join(f'<span style="white-space:nowrap">{part}</span>' for part in parts)


def _pane() -> QPlainTextEdit:
    pane = QPlainTextEdit(readOnly=True)
    pane.setFont(theme.mono_font())
    return pane


def _line() -> QLabel:
    line = label(font=theme.figures_font(12), role="muted", wrap=True, selectable=True)
    line.setTextFormat(Qt.TextFormat.RichText)
    return line


def _side(title: str, line: QLabel, more: QLabel | None, pane: QPlainTextEdit) -> QWidget:
    side = QWidget()
    column = QVBoxLayout(side)
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(6)
    head = QHBoxLayout()
    head.setSpacing(2 * theme.SPACE)
    head.addWidget(label(title, theme.heading_font()), 0, Qt.AlignmentFlag.AlignTop)
    head.addWidget(line, 1)
    column.addLayout(head)
    if more is not None:
        column.addWidget(more)
    column.addWidget(pane, 1)
    return side


def _put(pane: QPlainTextEdit, text: Any) -> None:
    shown = text if isinstance(text, str) else "" if text is None else str(text)
    if pane.toPlainText() != shown:
        pane.setPlainText(shown)
