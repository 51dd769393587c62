"""One completion in full: its prompt, the text as sampled, its reward and advantage, and each function's score."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QSyntaxHighlighter
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPlainTextEdit, QSplitter, QTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import label
from app.widgets.basic.number_format import figure, signed
from app.widgets.completions.completion_table import STOP_LABELS, advantage_colour
from backend.spec.completion_rows import token_count


class CompletionDetail(QFrame):
    """The prompt on the left and the completion with its scores on the right; with `upright`, one above the other."""

    def __init__(self, parent: QWidget | None = None, *, upright: bool = False) -> None:
        super().__init__(parent)
        self._names: Sequence[str] = ()
        self._labels: Sequence[str] = ()
        self._shown: tuple[Mapping[str, Any], Mapping[str, Any] | None] | None = None
        self.setProperty("role", "card")
        self.prompt, self.text = _pane(), _pane()
        self.prompt.setAccessibleName("Prompt")
        self.text.setAccessibleName("Completion")
        self._highlighters = [TagHighlighter(pane) for pane in (self.prompt, self.text)]
        self._answer, self._result, self._scores = _rich_label(), _rich_label(), _rich_label()
        splitter = self._splitter = QSplitter(childrenCollapsible=False, handleWidth=2 * theme.SPACE)
        self.set_upright(upright)
        splitter.addWidget(_side("Prompt", self._answer, None, self.prompt))
        splitter.addWidget(_side("Completion", self._result, self._scores, self.text))
        splitter.setStretchFactor(0, 2)
        splitter.setStretchFactor(1, 3)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 10, 12, 12)
        row.addWidget(splitter)
        theme.signals.changed.connect(self._recolour)

    def set_upright(self, upright: bool) -> None:
        self._splitter.setOrientation(Qt.Orientation.Vertical if upright else Qt.Orientation.Horizontal)

    def set_rewards(self, names: Sequence[str], labels: Sequence[str]) -> None:
        """Set the reward functions' metric names and labels; a function's index decides its colour."""
        self._names, self._labels = names, labels

    def show_completion(self, row: Mapping[str, Any], completion: Mapping[str, Any] | None) -> None:
        """Show a completion of `row` (one line of completions.jsonl); None shows the prompt alone."""
        self._shown = (row, completion)
        answer = row.get("answer")
        self._answer.setText(f"Answer: {html.escape(str(answer))}" if answer not in (None, "") else "")
        _set_text(self.prompt, row.get("prompt"))
        _set_text(self.text, (completion or {}).get("text"))
        self._result.setText(_result_html(completion) if completion else "")
        self._scores.setText(self._scores_html(completion) if completion else "")

    def _recolour(self) -> None:
        # Colours are written into the rich text and the formats, which do not follow a change of the palette.
        for highlighter in self._highlighters:
            highlighter.rehighlight()
        if self._shown is not None:
            self.show_completion(*self._shown)

    def _scores_html(self, completion: Mapping[str, Any]) -> str:
        scores = completion.get("rewards")
        scores = scores if isinstance(scores, Mapping) else {}
        return scores_html(self._labels, [scores.get(name) for name in self._names])


def scores_html(labels: Sequence[str], scores: Sequence[float | None], colours: Sequence[int] | None = None) -> str:
    """“● Accuracy 2   ● Format 0.5”: each function's score after a dot in its colour. `colours` are the functions' indices among the
    run's, by default their places here."""
    parts = [
        f'<span style="color:{theme.reward_colour(colour).name()}">●</span> {html.escape(short)} {figure(score)}'
        for colour, short, score in zip(colours or range(len(labels)), labels, scores, strict=True)
    ]
    return _join_unbroken(parts)


class TagHighlighter(QSyntaxHighlighter):
    """Colours tags such as <answer>, so that the parts of a completion are visible at a glance."""

    _TAG = re.compile(r"</?[A-Za-z|][^<>\s]{0,40}>")

    def __init__(self, pane: QPlainTextEdit | QTextEdit) -> None:
        super().__init__(pane.document())

    def highlightBlock(self, text: str) -> None:
        for tag in self._TAG.finditer(text):
            self.setFormat(tag.start(), tag.end() - tag.start(), theme.palette().accent)


def _result_html(completion: Mapping[str, Any]) -> str:
    """Reward, advantage, token count and stop reason of a completion."""
    advantage, stop = completion.get("advantage"), str(completion.get("stop"))
    return _join_unbroken(
        [
            f"<b>Reward {figure(completion.get('reward'))}</b>",
            f'<span style="color:{advantage_colour(advantage).name()}">Advantage {signed(advantage)}</span>',
            f"{figure(token_count(completion.get('tokens')))} tokens, {STOP_LABELS.get(stop, stop)}",
        ]
    )


def _join_unbroken(parts: Sequence[str]) -> str:
    """Join the parts so that lines break between them only."""
    return " &nbsp;&nbsp; ".join(f'<span style="white-space:nowrap">{part}</span>' for part in parts)


def _pane() -> QPlainTextEdit:
    pane = QPlainTextEdit(readOnly=True)
    pane.setFont(theme.mono_font())
    return pane


def _rich_label() -> QLabel:
    made = label(font=theme.figures_font(12), role="muted", wrap=True, selectable=True)
    made.setTextFormat(Qt.TextFormat.RichText)
    return made


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


def _set_text(pane: QPlainTextEdit, text: Any) -> None:
    """Show `text`, unless it is there already: setting it again would scroll to the top and drop the selection."""
    shown = text if isinstance(text, str) else "" if text is None else str(text)
    if pane.toPlainText() != shown:
        pane.setPlainText(shown)
