"""A completion in close-up: parts folded away, tokens coloured by a number, or what differs from another completion."""

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any, Literal

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtGui import QColor, QFont, QHelpEvent, QTextCharFormat
from PySide6.QtWidgets import QToolTip

from app import theme
from app.widgets.basic.controls import CheckBox, ComboBox, LinkButton
from app.widgets.basic.labels import label, show_text
from app.widgets.basic.layout import row, set_shown
from app.widgets.basic.number_format import counted, figure, finite, signed
from app.widgets.completion_detail import CompletionPane, conversation_format, show_parts
from backend.runs.completion_rows import Kind, conversation_parts, conversation_text
from backend.utils.text import visible

STRONGEST, CHANGED = 0.45, 0.30
"""Share of the colour behind the strongest token and a changed text: more would take the text's contrast below 4.5."""
SHADES, LEGEND_CELLS = 24, 13
MOST_WORDS = 6000  # words of two texts together above which whole lines are compared: the time grows with the square
FOLDABLE = {"think": "Thinking", "answer": "Answer"}  # tag → the name of what is between its opening and closing one
NOT_RECORDED = "This run did not record its tokens. Turn on Record tokens, an advanced setting."
NOT_LEARNED = "No update used this completion, so only values from sampling were recorded."
CHANGES = "Added words are bold and green, removed ones are struck out and red."
HINT = f"{'⌘' if sys.platform == 'darwin' else 'Ctrl'}-click a second completion to compare the two."
GREY = "Grey: results of tools, which the model reads and is not trained on."

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")

Part = tuple[Literal["same", "removed", "added"], str]


@dataclass(frozen=True, slots=True)
class TokenMeasure:
    """One way to colour tokens: `key` of the token data, and roles for values below and above 0 (of a ratio 1)."""

    key: str
    label: str
    unit: str
    below: str
    above: str
    sentence: str
    is_ratio: bool = False


BLUE_ORANGE = ("advantage_below", "advantage_above")
SAMPLED = "Log-probability of each token when it was sampled, at the run's temperature, before top-p, top-k and min-p."
LEARNED = "Log-probability of each token before the step's last update."
RATIO = "How much likelier each token had become before the step's last update. With one update per step it is 1."
CLIPPED = "Tokens whose ratio was clipped in the step's last update, so that they had no gradient."
LEARNED_WITH = "The advantage of each token, times the importance correction; 0 where it had no policy term."
MEASURES: tuple[TokenMeasure, ...] = (
    TokenMeasure("logp", "Log-probability when sampled", "nats", "advantage_below", "good", SAMPLED),
    TokenMeasure("learned_logp", "Log-probability when learned", "nats", "advantage_below", "good", LEARNED),
    TokenMeasure("ratio", "Ratio", "π new / π old", *BLUE_ORANGE, RATIO, is_ratio=True),
    TokenMeasure("clipped", "Clipped", "1: clipped", "clip", "clip", CLIPPED),
    TokenMeasure("advantage", "Advantage", "", *BLUE_ORANGE, LEARNED_WITH),
)


@dataclass(frozen=True, slots=True)
class ColouredTokens:
    """`texts` with a value and a strength each, −1 to 1, None for a token without a value.

    `extreme` is the distance from the middle that is drawn strongest.
    """

    measure: TokenMeasure
    texts: Sequence[str]
    values: Sequence[float | None]
    strengths: Sequence[float | None]
    trained: Sequence[bool]
    extreme: float

    @property
    def span(self) -> tuple[float, float]:
        known = [x for x in self.strengths if x is not None]
        return (-1.0 if min(known, default=0) < 0 else 0.0), (1.0 if max(known, default=0) > 0 else 0.0)

    @property
    def ends(self) -> tuple[str, str]:
        low, high = (end * self.extreme for end in self.span)
        if self.measure.is_ratio:
            left, right = (f"{math.exp(x):.3g}" if x else "1.00" for x in (low, high))
        else:
            left, right = (signed(x) for x in (low, high))
        return left, f"{right} {self.measure.unit}".strip()

    def tip(self, number: int) -> str:
        text, value = self.texts[number].replace("\n", "⏎"), figure(self.values[number])
        shown = f"token {number + 1}, “{text}”: {self.measure.label} {value} {self.measure.unit}".strip()
        return shown if self.trained[number] else f"{shown}; not trained on"


def coloured(measure: TokenMeasure, data: Mapping[str, Any], advantage: Any) -> ColouredTokens | None:
    """The tokens by this measure; None where the data does not have it.

    `advantage` is the completion's own, for every token where the data has no others.
    """
    texts = [visible(text) if isinstance(text, str) else "" for text in data["text"]]
    listed = data.get(measure.key)
    if measure.key == "advantage" and listed is None and "ratio" in data:
        listed = [advantage] * len(texts)
    if not isinstance(listed, list):
        return None
    mask = data.get("mask")
    trained = [bool(x) for x in mask] if isinstance(mask, list) else [True] * len(texts)
    values = [finite(value) for value in listed]
    distances = [x if x is None or not measure.is_ratio else math.log(max(x, 1e-12)) for x in values]
    known = [abs(x) for x, counts in zip(distances, trained, strict=False) if x is not None and counts]
    extreme = max(known, default=0.0)
    strengths = [None if x is None else max(-1.0, min(1.0, x / extreme)) if extreme else 0.0 for x in distances]
    return ColouredTokens(measure, texts, values, strengths, trained, extreme)


def background(measure: TokenMeasure, strength: float) -> QColor:
    role = measure.below if strength < 0 else measure.above
    return blend(getattr(theme.palette(), role), STRONGEST * abs(strength))


def blend(over: QColor, share: float) -> QColor:
    under = theme.palette().field
    parts = ((under.redF(), over.redF()), (under.greenF(), over.greenF()), (under.blueF(), over.blueF()))
    return QColor.fromRgbF(*(a + (b - a) * share for a, b in parts))


def diff(old: str, new: str) -> list[Part]:
    """The parts of both texts, in order; those that are not added make up `old`, those not removed `new`."""
    first, second = _WORDS.findall(old), _WORDS.findall(new)
    if len(first) + len(second) > MOST_WORDS:
        first, second = old.splitlines(keepends=True), new.splitlines(keepends=True)
    # Equal beginnings and ends are most of two completions of one prompt, and cost the matcher the most.
    head = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    rest = zip(reversed(first[head:]), reversed(second[head:]), strict=False)
    tail = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], rest))
    middle = first[head : len(first) - tail], second[head : len(second) - tail]
    parts: list[Part] = [("same", "".join(first[:head]))]
    for kind, a, b, c, d in SequenceMatcher(None, *middle, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(("same", "".join(middle[0][a:b])))
        else:
            parts.extend([("removed", "".join(middle[0][a:b])), ("added", "".join(middle[1][c:d]))])
    parts.append(("same", "".join(first[len(first) - tail :])))
    return [part for part in parts if part[1]]


def fold(text: str, tags: Iterable[str]) -> str:
    """Replace what is between these tags by the number of its words."""

    def folded(match: re.Match[str]) -> str:
        words = len(match[2].split())
        return f"{match[1]} … {counted(words, 'word')} … {match[3]}"

    for tag in tags:
        text = re.sub(rf"(<{tag}>)(.*?)(</{tag}>|\Z)", folded, text, flags=re.DOTALL)
    return text


class ReadingPane(CompletionPane):
    def __init__(self, title: str) -> None:
        super().__init__(title)
        self._own_title = title
        self.load_tokens: Callable[[], Mapping[str, Any] | None] = lambda: None  # of the completion shown next
        self._pair: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        self._ends: list[int] = []
        self.text.viewport().installEventFilter(self)
        self.folds = {tag: CheckBox(f"Fold {name.lower()}", toggled=self._show_text) for tag, name in FOLDABLE.items()}
        names = {None: "Tokens not coloured", **{measure.key: measure.label for measure in MEASURES}}
        tips = ["", *(measure.sentence for measure in MEASURES)]
        self.measure = ComboBox(name="Colour tokens by", length=22, items=names, tips=tips)
        self.measure.currentIndexChanged.connect(self._show_text)
        self.tokens: ColouredTokens | None = None
        rich = Qt.TextFormat.RichText
        self.legend = label(font=theme.figures_font(theme.CAPTION), textFormat=rich, visible=False)
        self.explanation = label(font=theme.caption_font(), role="caption", wrap=True, visible=False)
        self.setting = LinkButton("Go to the setting", visible=False)
        self.hint = label(font=theme.caption_font(), role="caption", wrap=True)
        self.body.insertLayout(2, row(*self.folds.values(), None, self.legend, self.measure, spacing=2 * theme.SPACE))
        self.body.insertLayout(3, row((self.explanation, 1), self.setting, spacing=2 * theme.SPACE))
        self.body.addWidget(self.hint)

    def show_completion(self, completion: Mapping[str, Any] | None) -> None:
        self._pair = None
        super().show_completion(completion)
        self.set_title(self._own_title)
        self._show_text()

    def show_difference(self, first: Mapping[str, Any], second: Mapping[str, Any], title: str) -> None:
        super().show_completion(second)
        self._pair = (first, second)
        self.set_title(title)
        self.result.setText(f"Reward {figure(first.get('reward'))} → <b>{figure(second.get('reward'))}</b>")
        self._show_text()

    def _recolour(self) -> None:
        pair, title = self._pair, self.title.text()
        super()._recolour()
        if pair is not None:
            self.show_difference(*pair, title)

    def _show_text(self) -> None:
        if self._completion is None:
            return
        conversation: list[tuple[Kind, str]] = [(kind, visible(t)) for kind, t in conversation_parts(self._completion)]
        text = "".join(text for kind, text in conversation if kind == "text")
        tokens = None if self._pair else self._tokens()
        for tag, box in self.folds.items():
            set_shown(box, f"<{tag}>" in text and not self._pair)
            box.setEnabled(tokens is None)  # a token has no place in a text that is folded
        set_shown(self.measure, self._pair is None)
        if self._pair:
            parts = diff(*(visible(conversation_text(each)) for each in self._pair))
            self._explain("The two texts are the same." if all(kind == "same" for kind, _ in parts) else CHANGES)
            shown = []
            for kind, part in parts:
                form, is_added = QTextCharFormat(), kind == "added"  # not by the colour alone
                form.setBackground(blend(theme.palette().good if is_added else theme.palette().bad, CHANGED))
                form.setFontStrikeOut(not is_added)
                form.setFontWeight(QFont.Weight.DemiBold if is_added else QFont.Weight.Normal)
                shown.append((part, None if kind == "same" else form))
        elif tokens is not None:
            shown = []
            for text, strength, is_trained in zip(tokens.texts, tokens.strengths, tokens.trained, strict=False):
                form, shade = QTextCharFormat(), round((strength or 0.0) * SHADES)
                if is_trained and shade:
                    form.setBackground(background(tokens.measure, shade / SHADES))
                elif not is_trained:
                    form.setForeground(theme.palette().muted)
                    form.setUnderlineStyle(QTextCharFormat.UnderlineStyle.DotLine)
                shown.append((text, form if shade or not is_trained else None))
        else:
            tags = [tag for tag, box in self.folds.items() if box.isChecked()]
            shown = [
                (fold(part, tags) if kind == "text" else part, conversation_format(kind)) for kind, part in conversation
            ]
        self._ends, self.tokens = show_parts(self.text, shown), tokens
        set_shown(self.legend, tokens is not None)
        if tokens is not None:
            (low, high), (left, right) = tokens.span, tokens.ends
            shades = (low + (high - low) * at / (LEGEND_CELLS - 1) for at in range(LEGEND_CELLS))
            cells = (
                f'<span style="background:{background(tokens.measure, x).name()}">&nbsp;&nbsp;</span>' for x in shades
            )
            self.legend.setText(f"{left}&nbsp; {''.join(cells)} &nbsp;{right}")
            self.legend.setAccessibleName(f"{tokens.measure.label}: colours from {left} to {right}")

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        tokens = self.tokens
        if tokens is None or event.type() != QEvent.Type.ToolTip or not isinstance(event, QHelpEvent):
            return False
        position = self.text.cursorForPosition(event.pos()).position()
        number = next((at for at, end in enumerate(self._ends) if position < end), None)
        QToolTip.showText(event.globalPos(), "" if number is None else tokens.tip(number), self.text)
        return True

    def _tokens(self) -> ColouredTokens | None:
        measure = next((measure for measure in MEASURES if measure.key == self.measure.currentData()), None)
        data = self.load_tokens() if measure else None
        found = coloured(measure, data, (self._completion or {}).get("advantage")) if measure and data else None
        self._explain("" if found or not measure else NOT_LEARNED if data else NOT_RECORDED)
        self.measure.setToolTip(measure.sentence if measure else "")
        return found

    def _explain(self, sentence: str) -> None:
        show_text(self.explanation, sentence)
        set_shown(self.setting, sentence == NOT_RECORDED)
