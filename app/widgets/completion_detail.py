"""One completion in full: the text as sampled, its reward and advantage, each function's score, and its prompt."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QSyntaxHighlighter
from PySide6.QtWidgets import QFrame, QLabel, QPlainTextEdit, QTextEdit, QVBoxLayout, QWidget

from app import theme
from app.state.completion_facts import logged_of, scores_of
from app.widgets.basic.labels import label
from app.widgets.basic.layout import column, configure, holder, row, splitter
from app.widgets.basic.number_format import figure, signed
from app.widgets.completion_table import STOP_LABELS, advantage_colour, logged_text
from backend.runs.completion_rows import token_count
from backend.utils.text import visible


class TagHighlighter(QSyntaxHighlighter):
    """Colours tags such as <answer>, so that the parts of a completion are visible at a glance."""

    _TAG = re.compile(r"</?[A-Za-z|][^<>\s]{0,40}>")

    def __init__(self, pane: QPlainTextEdit | QTextEdit) -> None:
        super().__init__(pane.document())

    def highlightBlock(self, text: str) -> None:
        for tag in self._TAG.finditer(text):
            self.setFormat(tag.start(), tag.end() - tag.start(), theme.palette().accent)


class TextPane(QPlainTextEdit):
    def __init__(self, name: str) -> None:
        super().__init__(readOnly=True)
        configure(self, name=name, font=theme.mono_font())
        highlighter = TagHighlighter(self)
        theme.signals.changed.connect(highlighter.rehighlight)

    def show_text(self, text: Any) -> None:
        shown = visible("" if text is None else str(text))
        if self.toPlainText() != shown:  # setting it again would scroll to the top and drop the selection
            self.setPlainText(shown)


class CompletionPane(QWidget):
    def __init__(self, title: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._names: Sequence[str] = ()
        self._labels: Sequence[str] = ()
        self._weights: Sequence[float] = ()
        self._completion: Mapping[str, Any] | None = None
        self.text = TextPane(title)
        self.title = label(title, theme.heading_font(), minimumHeight=theme.scaled(22))  # as high as a link
        self.result, self.scores = _rich_label(), _rich_label()
        head = row((self.title, 0, Qt.AlignmentFlag.AlignTop), (self.result, 1), spacing=2 * theme.SPACE)
        self.body: QVBoxLayout = column(head, self.scores, (self.text, 1), into=self, spacing=6)
        # Colours are written into the rich text and the formats, which do not follow a change of the palette.
        theme.signals.changed.connect(self._recolour)

    def set_title(self, title: str) -> None:
        self.title.setText(title)
        self.text.setAccessibleName(title)

    def set_rewards(self, names: Sequence[str], labels: Sequence[str], weights: Sequence[float] = ()) -> None:
        self._names, self._labels, self._weights = names, labels, weights

    def show_completion(self, completion: Mapping[str, Any] | None) -> None:
        self._completion = completion
        self.text.show_text((completion or {}).get("text"))
        self.result.setText(_result_html(completion) if completion else "")
        self.scores.setText(self._scores_html(completion) if completion else "")

    def _recolour(self) -> None:
        self.show_completion(self._completion)

    def _scores_html(self, completion: Mapping[str, Any]) -> str:
        scores = scores_of(completion)
        shown = scores_html(self._names, self._labels, [scores.get(name) for name in self._names], self._weights)
        total = f"{figure(completion.get('reward'))} = {shown}" if self._weights else shown
        logged = " &nbsp;&nbsp; ".join(
            f"{html.escape(str(name))}: {html.escape(logged_text(value))}"
            for name, value in logged_of(completion).items()
        )
        return f"{total}<br>{logged}" if logged else total


class CompletionDetail(QFrame):
    def __init__(
        self, parent: QWidget | None = None, *, upright: bool = False, pane: CompletionPane | None = None
    ) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.prompt = TextPane("Prompt")
        self._answer = _rich_label()
        self.completion = pane or CompletionPane("Completion")
        self.text = self.completion.text
        title = label("Prompt", theme.heading_font(), minimumHeight=theme.scaled(22))
        self.head = row((title, 0, Qt.AlignmentFlag.AlignTop), (self._answer, 1), spacing=2 * theme.SPACE)
        side = holder(column(self.head, (self.prompt, 1), spacing=6))
        self._splitter = splitter(side, self.completion, gap=2 * theme.SPACE, stretch=(2, 3), upright=upright)
        row(self._splitter, into=self, margins=(12, 10, 12, 12))

    def set_upright(self, upright: bool) -> None:
        self._splitter.setOrientation(Qt.Orientation.Vertical if upright else Qt.Orientation.Horizontal)

    def show_completion(self, row: Mapping[str, Any], completion: Mapping[str, Any] | None) -> None:
        """Show a completion of `row` (one line of completions.jsonl); None shows the prompt alone."""
        answer = row.get("answer")
        self._answer.setText(f"Answer: {html.escape(visible(str(answer)))}" if answer not in (None, "") else "")
        self.prompt.show_text(row.get("prompt"))
        self.completion.show_completion(completion)


def scores_html(
    names: Sequence[str], labels: Sequence[str], scores: Sequence[float | None], weights: Sequence[float] = ()
) -> str:
    """“● Accuracy 2 ● Format 0.5”: each score after a dot in its function's colour."""
    parts = [
        f'<span style="color:{theme.reward_colour(name).name()}">●</span> {html.escape(short)} {figure(score)}'
        for name, short, score in zip(names, labels, scores, strict=True)
    ]
    if weights:
        return _join_unbroken([f"{part} × {weight:g}" for part, weight in zip(parts, weights, strict=True)], " + ")
    return _join_unbroken(parts)


def _result_html(completion: Mapping[str, Any]) -> str:
    stop = str(completion.get("stop"))
    parts = [f"<b>Reward {figure(completion.get('reward'))}</b>"]
    if "advantage" in completion:
        colour = advantage_colour(completion["advantage"]).name()
        parts.append(f'<span style="color:{colour}">Advantage {signed(completion["advantage"])}</span>')
    parts.append(f"{figure(token_count(completion.get('tokens')))} tokens, {html.escape(STOP_LABELS.get(stop, stop))}")
    return _join_unbroken(parts)


def _join_unbroken(parts: Sequence[str], between: str = " &nbsp;&nbsp; ") -> str:
    return between.join(f'<span style="white-space:nowrap">{part}</span>' for part in parts)


def _rich_label() -> QLabel:
    font, rich = theme.figures_font(12), Qt.TextFormat.RichText
    return label(font=font, role="muted", wrap=True, selectable=True, textFormat=rich)
