"""One completion in full: the text as sampled, its reward and advantage, each function's score, and its prompt beside it."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QSyntaxHighlighter
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPlainTextEdit, QSplitter, QTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels import label
from app.widgets.basic.number_format import figure, signed
from app.widgets.completions.completion_model import STOP_LABELS, advantage_colour, logged_text
from backend.runs.completion_rows import token_count
from backend.utils.text import visible


class CompletionPane(QWidget):
    """A completion under its title: its result, its scores, its text."""

    def __init__(self, title: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._names: Sequence[str] = ()
        self._labels: Sequence[str] = ()
        self._weights: Sequence[float] = ()
        self._completion: Mapping[str, Any] | None = None
        self.text = _pane(title)
        self._highlighter = TagHighlighter(self.text)
        self._result, self._scores = _rich_label(), _rich_label()
        self._title = label(title, theme.heading_font())
        _lay_out_side(self, self._title, self._result, self._scores, self.text)
        theme.signals.changed.connect(self._recolour)

    def set_title(self, title: str) -> None:
        self._title.setText(title)
        self.text.setAccessibleName(title)

    def set_rewards(self, names: Sequence[str], labels: Sequence[str], weights: Sequence[float] = ()) -> None:
        """Set the reward functions' metric names and labels; a function's index decides its colour. With `weights` the scores are
        written as the sum that makes up the reward."""
        self._names, self._labels, self._weights = names, labels, weights

    def show_completion(self, completion: Mapping[str, Any] | None) -> None:
        self._completion = completion
        _set_text(self.text, (completion or {}).get("text"))
        self._result.setText(_result_html(completion) if completion else "")
        self._scores.setText(self._scores_html(completion) if completion else "")

    def _recolour(self) -> None:
        # Colours are written into the rich text and the formats, which do not follow a change of the palette.
        self._highlighter.rehighlight()
        self.show_completion(self._completion)

    def _scores_html(self, completion: Mapping[str, Any]) -> str:
        scores = completion.get("rewards")
        scores = scores if isinstance(scores, Mapping) else {}
        shown = scores_html(self._labels, [scores.get(name) for name in self._names], weights=self._weights)
        logged = _logged_html(completion)
        total = f"{figure(completion.get('reward'))} = {shown}" if self._weights else shown
        return f"{total}<br>{logged}" if logged else total


def scores_html(
    labels: Sequence[str],
    scores: Sequence[float | None],
    colours: Sequence[int] | None = None,
    weights: Sequence[float] = (),
) -> str:
    """“● Accuracy 2   ● Format 0.5”: each function's score after a dot in its colour; with weights “● Accuracy 2 × 1 + ● Format 0.5 × 0.2”.
    `colours` are the functions' indices among the run's, by default their places here."""
    parts = [
        f'<span style="color:{theme.reward_colour(colour).name()}">●</span> {html.escape(short)} {figure(score)}'
        for colour, short, score in zip(colours or range(len(labels)), labels, scores, strict=True)
    ]
    weighted = [f"{part} × {weight:g}" for part, weight in zip(parts, weights, strict=True)] if weights else parts
    return _join_unbroken(weighted, " + " if weights else " &nbsp;&nbsp; ")


class CompletionDetail(QFrame):
    """The prompt on the left and the completion with its scores on the right; with `upright`, one above the other."""

    def __init__(
        self, parent: QWidget | None = None, *, upright: bool = False, pane: CompletionPane | None = None
    ) -> None:
        """`pane`: what shows the completion, a plain CompletionPane if left out."""
        super().__init__(parent)
        self.setProperty("role", "card")
        self.prompt = _pane("Prompt")
        self._highlighter = TagHighlighter(self.prompt)
        self._answer = _rich_label()
        self.completion = pane or CompletionPane("Completion")
        self.text = self.completion.text
        side = QWidget()
        self._prompt_head = _lay_out_side(side, label("Prompt", theme.heading_font()), self._answer, None, self.prompt)
        splitter = self._splitter = QSplitter(childrenCollapsible=False, handleWidth=2 * theme.SPACE)
        self.set_upright(upright)
        splitter.addWidget(side)
        splitter.addWidget(self.completion)
        splitter.setStretchFactor(0, 2)
        splitter.setStretchFactor(1, 3)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 10, 12, 12)
        row.addWidget(splitter)
        theme.signals.changed.connect(self._highlighter.rehighlight)

    def add_link(self, link: QWidget) -> None:
        """Add a control at the right of the prompt's head."""
        self._prompt_head.addWidget(link, 0, Qt.AlignmentFlag.AlignTop)

    def set_upright(self, upright: bool) -> None:
        self._splitter.setOrientation(Qt.Orientation.Vertical if upright else Qt.Orientation.Horizontal)

    def set_rewards(self, names: Sequence[str], labels: Sequence[str], weights: Sequence[float] = ()) -> None:
        self.completion.set_rewards(names, labels, weights)

    def show_completion(self, row: Mapping[str, Any], completion: Mapping[str, Any] | None) -> None:
        """Show a completion of `row` (one line of completions.jsonl); None shows the prompt alone."""
        self._answer.setText(answer_html(row))
        _set_text(self.prompt, row.get("prompt"))
        self.completion.show_completion(completion)


def answer_html(row: Mapping[str, Any]) -> str:
    """The dataset's answer of a row, as a label shows it; "" where there is none."""
    answer = row.get("answer")
    return f"Answer: {html.escape(visible(str(answer)))}" if answer not in (None, "") else ""


class TagHighlighter(QSyntaxHighlighter):
    """Colours tags such as <answer>, so that the parts of a completion are visible at a glance."""

    _TAG = re.compile(r"</?[A-Za-z|][^<>\s]{0,40}>")

    def __init__(self, pane: QPlainTextEdit | QTextEdit) -> None:
        super().__init__(pane.document())

    def highlightBlock(self, text: str) -> None:
        for tag in self._TAG.finditer(text):
            self.setFormat(tag.start(), tag.end() - tag.start(), theme.palette().accent)


def _result_html(completion: Mapping[str, Any]) -> str:
    """Reward, advantage where it has one, token count and stop reason of a completion."""
    stop = str(completion.get("stop"))
    parts = [f"<b>Reward {figure(completion.get('reward'))}</b>"]
    if "advantage" in completion:
        advantage = completion["advantage"]
        colour = advantage_colour(advantage).name()
        parts.append(f'<span style="color:{colour}">Advantage {signed(advantage)}</span>')
    parts.append(f"{figure(token_count(completion.get('tokens')))} tokens, {html.escape(STOP_LABELS.get(stop, stop))}")
    return _join_unbroken(parts)


def _logged_html(completion: Mapping[str, Any]) -> str:
    """“kind: sum   tests passed: 3 of 5”: what reward functions logged; "" where there is nothing."""
    logged = completion.get("logged")
    values = logged.items() if isinstance(logged, Mapping) else ()
    return " &nbsp;&nbsp; ".join(
        f"{html.escape(str(name))}: {html.escape(logged_text(value))}" for name, value in values
    )


def _join_unbroken(parts: Sequence[str], between: str = " &nbsp;&nbsp; ") -> str:
    """Join the parts so that lines break between them only."""
    return between.join(f'<span style="white-space:nowrap">{part}</span>' for part in parts)


def _pane(name: str) -> QPlainTextEdit:
    pane = QPlainTextEdit(readOnly=True)
    pane.setFont(theme.mono_font())
    pane.setAccessibleName(name)
    return pane


def _rich_label() -> QLabel:
    made = label(font=theme.figures_font(12), role="muted", wrap=True, selectable=True)
    made.setTextFormat(Qt.TextFormat.RichText)
    return made


def _lay_out_side(side: QWidget, title: QLabel, line: QLabel, more: QLabel | None, pane: QPlainTextEdit) -> QHBoxLayout:
    """Title and line above the pane, `more` between them; returns the row of the title."""
    column = QVBoxLayout(side)
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(6)
    head = QHBoxLayout()
    head.setSpacing(2 * theme.SPACE)
    head.addWidget(title, 0, Qt.AlignmentFlag.AlignTop)
    head.addWidget(line, 1)
    column.addLayout(head)
    if more is not None:
        column.addWidget(more)
    column.addWidget(pane, 1)
    return head


def _set_text(pane: QPlainTextEdit, text: Any) -> None:
    """Show `text`, unless it is there already: setting it again would scroll to the top and drop the selection."""
    shown = visible("" if text is None else str(text))
    if pane.toPlainText() != shown:
        pane.setPlainText(shown)
