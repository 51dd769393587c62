"""One completion in full with its prompt and scores, and one prompt with completions before and after training."""

import html
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QSyntaxHighlighter, QTextCharFormat, QTextCursor, QTextFormat
from PySide6.QtWidgets import QFrame, QLabel, QPlainTextEdit, QTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.labels import button, label, plain_tip
from app.widgets.basic.layout import column, configure, holder, row, splitter
from app.widgets.basic.number_format import counted, figure, finite, signed
from app.widgets.completion_table import STOP_LABELS, advantage_colour, logged_text, one_line
from app.widgets.pictures import PictureStrip
from backend.runs.completion_rows import (
    EXPLANATION,
    Kind,
    conversation_parts,
    explanation_of,
    images_of,
    logged_of,
    policy_tokens,
    scores_of,
    turns_mark,
)
from backend.utils.text import visible

SHADE = 0.12  # share of grey behind the results of tools
LONGEST_EXPLANATION = 800  # characters of a judge's: a reply of several pages would leave no room for the completion


class TagHighlighter(QSyntaxHighlighter):
    """Colours tags such as <answer>, so that the parts of a completion are visible at a glance."""

    _TAG = re.compile(r"</?[A-Za-z|][^<>\s]{0,40}>")

    def __init__(self, pane: QPlainTextEdit | QTextEdit) -> None:
        super().__init__(pane.document())
        theme.signals.changed.connect(self.rehighlight)

    def highlightBlock(self, text: str) -> None:
        for tag in self._TAG.finditer(text):
            self.setFormat(tag.start(), tag.end() - tag.start(), theme.palette().accent)


class TextPane(QPlainTextEdit):
    def __init__(self, name: str) -> None:
        super().__init__(readOnly=True)
        configure(self, name=name, font=theme.mono_font())
        TagHighlighter(self)

    def show_text(self, text: Any) -> None:
        shown = visible("" if text is None else str(text))
        if self.toPlainText() != shown:  # setting it again would scroll to the top and drop the selection
            self.setPlainText(shown)


def show_parts(pane: Any, parts: Sequence[tuple[str, QTextCharFormat | None]]) -> list[int]:
    """Show a text in a pane, each part in its format. Returns where they end, in characters of the document."""
    pane.show_text("".join(text for text, _ in parts))
    # A document counts UTF-16 units, two for an emoji.
    ends = list(accumulate(len(text.encode("utf-16-le", "surrogatepass")) // 2 for text, _ in parts))
    marks, start = [], 0
    for form, run in groupby(zip(ends, parts, strict=True), key=lambda pair: pair[1][1]):
        end = [end for end, _ in run][-1]
        if form is not None:
            mark = QTextEdit.ExtraSelection()
            mark.cursor = QTextCursor(pane.document())
            mark.cursor.setPosition(start)
            mark.cursor.setPosition(end, QTextCursor.MoveMode.KeepAnchor)
            mark.format = form
            marks.append(mark)
        start = end
    pane.setExtraSelections(marks)
    return ends


def show_conversation(pane: Any, completion: Mapping[str, Any]) -> None:
    parts = conversation_parts(completion)
    show_parts(pane, [(visible(text), conversation_format(kind)) for kind, text in parts])


def conversation_format(kind: Kind) -> QTextCharFormat | None:
    """How a part of a conversation looks: what the model did not write is grey."""
    if kind == "text":
        return None
    form, colours = QTextCharFormat(), theme.palette()
    of_tool = kind in ("result", "failed")
    roles = {"call": colours.accent, "failed": colours.bad, "warning": colours.warning}
    form.setForeground(roles.get(kind, colours.muted))
    # Qt drops the colour of a part that follows a coloured one, unless one of them has a background.
    shade = QColor(colours.muted)
    shade.setAlphaF(SHADE if of_tool else 0)
    form.setBackground(shade)
    form.setProperty(QTextFormat.Property.FullWidthSelection, of_tool)
    return form


class CompletionPane(QWidget):
    def __init__(self, title: str) -> None:
        super().__init__()
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
        show_conversation(self.text, completion or {})
        self.result.setText("")
        self.scores.setText("")
        if not completion:
            return
        stop = str(completion.get("stop"))
        parts = [f"<b>Reward {figure(completion.get('reward'))}</b>"]
        if "advantage" in completion:
            colour = advantage_colour(completion["advantage"]).name()
            parts.append(f'<span style="color:{colour}">Advantage {signed(completion["advantage"])}</span>')
        if (tokens := policy_tokens(completion)) is not None:  # nobody knows those of a text that was pasted
            parts.append(f"{counted(tokens, 'token')}, {html.escape(STOP_LABELS.get(stop, stop))}")
        parts += filter(None, [turns_mark(completion)])
        self.result.setText(_join_unbroken(parts))
        scores = scores_of(completion)
        shown = scores_html(self._names, self._labels, [scores.get(name) for name in self._names], self._weights)
        lines = [f"{figure(completion.get('reward'))} = {shown}" if self._weights else shown]
        for name, short in zip(self._names, self._labels, strict=True):
            if explanation := visible(explanation_of(completion, name)[:LONGEST_EXPLANATION]):
                about = scores_html([name], [short], [scores.get(name)])
                lines.append(f"{about}: {html.escape(explanation).replace(chr(10), '<br>')}")
        lines.append(
            " &nbsp;&nbsp; ".join(
                f"{html.escape(str(name))}: {html.escape(logged_text(value))}"
                for name, value in logged_of(completion).items()
                if not name.endswith(EXPLANATION)
            )
        )
        self.scores.setText("<br>".join(filter(None, lines)))

    def _recolour(self) -> None:
        self.show_completion(self._completion)


class CompletionDetail(QFrame):
    def __init__(
        self, parent: QWidget | None = None, *, upright: bool = False, pane: CompletionPane | None = None
    ) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.prompt, self.pictures = TextPane("Prompt"), PictureStrip()
        self._answer = _rich_label()
        self.completion = pane or CompletionPane("Completion")
        self.text = self.completion.text
        title = label("Prompt", theme.heading_font(), minimumHeight=theme.scaled(22))
        self.head = row((title, 0, Qt.AlignmentFlag.AlignTop), (self._answer, 1), spacing=2 * theme.SPACE)
        side = holder(column(self.head, (row(self.pictures, (self.prompt, 1)), 1), spacing=6))
        self.parts = splitter(side, self.completion, gap=2 * theme.SPACE, stretch=(2, 3), upright=upright)
        row(self.parts, into=self, margins=(12, 10, 12, 12))

    def show_completion(self, row: Mapping[str, Any], completion: Mapping[str, Any] | None) -> None:
        answer = row.get("answer")
        self._answer.setText(f"Answer: {html.escape(visible(str(answer)))}" if answer not in (None, "") else "")
        self.prompt.show_text(row.get("prompt"))
        self.pictures.show_pictures(images_of(row))
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


def _join_unbroken(parts: Sequence[str], between: str = " &nbsp;&nbsp; ") -> str:
    return between.join(f'<span style="white-space:nowrap">{part}</span>' for part in parts)


def _rich_label() -> QLabel:
    font, rich = theme.figures_font(12), Qt.TextFormat.RichText
    return label(font=font, role="muted", wrap=True, selectable=True, textFormat=rich)


TITLES = {"base": "Base", "tuned": "Tuned", "model": "Model"}


class SideBySide(QFrame):
    def __init__(self) -> None:
        super().__init__()
        self.setProperty("role", "card")
        self._sides: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._number = 0
        self.prompt, self.answer = ElidedLabel(font=theme.mono_font()), label(font=theme.mono_font(), role="muted")
        before, after = "The previous completion", "The next completion"
        self.earlier = button("‹", lambda: self.go(-1), tip=before, name=before)
        self.later = button("›", lambda: self.go(1), tip=after, name=after)
        self.which = label(font=theme.figures_font(), role="muted")
        self.panes, self.pictures = (CompletionPane("Base"), CompletionPane("Tuned")), PictureStrip()
        head = row((self.prompt, 1), self.answer, self.earlier, self.which, self.later)
        body = column(head, (splitter(*self.panes, gap=2 * theme.SPACE, sizes=(1, 1)), 1))
        row(self.pictures, (body, 1), into=self, spacing=12, margins=(12, 10, 12, 12))

    def set_rewards(self, names: Sequence[str], labels: Sequence[str]) -> None:
        for pane in self.panes:
            pane.set_rewards(names, labels)

    def show_row(self, row: Mapping[str, Any] | None, sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Show the completions of `row` by side, the pair whose rewards differ most first; None shows nothing."""
        self._sides, self._number = dict(sides), 0
        if len(sides) > 1:
            pairs = zip(*list(sides.values())[:2], strict=False)
            rewards = [(finite(a.get("reward")), finite(b.get("reward"))) for a, b in pairs]
            gaps = [abs(b - a) if a is not None and b is not None else 0.0 for a, b in rewards]
            self._number = gaps.index(max(gaps)) if gaps else 0
        prompt, answer = (str((row or {}).get(key) or "") for key in ("prompt", "answer"))
        self.prompt.setText(one_line(prompt) if prompt else "")
        self.prompt.setToolTip(plain_tip(prompt))
        self.answer.setText(f"answer {one_line(answer)[:60]}" if answer else "")
        self.pictures.show_pictures(images_of(row or {}))
        self._show()

    def go(self, by: int) -> None:
        self._number += by
        self._show()

    def _show(self) -> None:
        count = max(map(len, self._sides.values()), default=0)
        for part in (self.earlier, self.which, self.later):
            part.setVisible(count > 1)
        self.which.setText(f"{self._number + 1} of {count}")
        self.earlier.setEnabled(self._number > 0)
        self.later.setEnabled(self._number < count - 1)
        shown = list(self._sides.items())
        for pane, (side, completions) in zip(self.panes, shown, strict=False):
            pane.set_title(TITLES.get(side, side))
            pane.show_completion(completions[self._number] if self._number < len(completions) else None)
            pane.show()
        for pane in self.panes[len(shown) :]:
            pane.show_completion(None)
            pane.setVisible(not shown)
