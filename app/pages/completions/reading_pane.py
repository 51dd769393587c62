"""A completion to be read closely: parts folded away, tokens coloured by a number, or two completions with what differs between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, takewhile
from typing import Any, Literal

from PySide6.QtCore import QEvent, QObject, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QFont, QHelpEvent, QLinearGradient, QPainter, QPaintEvent, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QHBoxLayout, QPlainTextEdit, QSizePolicy, QTextEdit, QToolTip, QVBoxLayout, QWidget

from app import theme
from app.pages.completions.token_colours import MEASURES, ColouredTokens, background, blend, coloured
from app.widgets.basic.controls import CheckBox, ComboBox, LinkButton
from app.widgets.basic.labels import label
from app.widgets.basic.layout import set_shown
from app.widgets.basic.number_format import figure
from app.widgets.completions.completion_detail import CompletionPane
from backend.utils.text import visible

# A pane of text with parts of it marked: tokens by a number, or what differs from another text.

STEPS = 24
"""Shades that strengths are rounded to, so that neighbours share one mark."""
CHANGE = 0.30
"""Share of the role's colour behind an insertion or a deletion."""


class MarkedText(QObject):
    """Marks parts of a pane's text. The pane stays whoever's it is; this object owns its extra selections and its tooltips."""

    def __init__(self, pane: QPlainTextEdit) -> None:
        super().__init__(pane)
        self._pane = pane
        self._tokens: ColouredTokens | None = None
        self._ends: list[int] = []
        pane.viewport().installEventFilter(self)

    def clear(self) -> None:
        self._tokens = None
        self._pane.setExtraSelections([])

    def show_tokens(self, tokens: ColouredTokens) -> None:
        """Mark the pane's text, which the tokens make up, by their strengths; tokens that are not trained on are underlined with dots."""
        self._tokens, self._ends = tokens, list(accumulate(map(_units, tokens.texts)))
        shades = [
            (None if x is None else round(x * STEPS), is_trained)
            for x, is_trained in zip(tokens.strengths, tokens.trained, strict=False)
        ]
        self._mark(_merged(shades, self._ends), lambda shade: self._token_format(tokens, *shade))

    def show_difference(self, parts: Iterable[tuple[str, str]]) -> None:
        """Mark what was removed and what was added: (kind, text), whose texts make up the pane's."""
        listed = list(parts)
        self._tokens = None
        ends = list(accumulate(_units(text) for _, text in listed))
        self._mark(_merged([kind for kind, _ in listed], ends), change_format)

    def _token_format(self, tokens: ColouredTokens, shade: int | None, is_trained: bool) -> QTextCharFormat | None:
        form = QTextCharFormat()
        if not is_trained:
            form.setForeground(theme.palette().muted)
            form.setUnderlineStyle(QTextCharFormat.UnderlineStyle.DotLine)
        elif shade:
            form.setBackground(background(tokens.measure, shade / STEPS))
        return form if shade or not is_trained else None

    def _mark(self, spans: Iterable[tuple[object, int, int]], format_of: Callable[..., QTextCharFormat | None]) -> None:
        marks = []
        for kind, start, end in spans:
            form = format_of(kind)
            if form is None:
                continue
            mark = QTextEdit.ExtraSelection()
            mark.cursor = QTextCursor(self._pane.document())
            mark.cursor.setPosition(start)
            mark.cursor.setPosition(end, QTextCursor.MoveMode.KeepAnchor)
            mark.format = form
            marks.append(mark)
        self._pane.setExtraSelections(marks)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Shows the numbers of the token below the pointer."""
        if self._tokens is None or event.type() != QEvent.Type.ToolTip or not isinstance(event, QHelpEvent):
            return False
        position = self._pane.cursorForPosition(event.pos()).position()
        number = next((at for at, end in enumerate(self._ends) if position < end), None)
        QToolTip.showText(event.globalPos(), "" if number is None else self.token_tip(number), self._pane)
        return True

    def token_tip(self, number: int) -> str:
        """What a token is and has, as one line."""
        tokens = self._tokens
        if tokens is None:
            return ""
        text = tokens.texts[number].replace("\n", "⏎")
        shown = f"token {number + 1}, “{text}”: {tokens.measure.label} {figure(tokens.values[number])} {tokens.measure.unit}"
        return shown.strip() if tokens.trained[number] else f"{shown.strip()}; not trained on"


def change_format(kind: str) -> QTextCharFormat | None:
    """How a part of a difference looks: not by its colour alone."""
    if kind == "same":
        return None
    colours, form = theme.palette(), QTextCharFormat()
    is_added = kind == "added"
    form.setBackground(blend(colours.field, colours.good if is_added else colours.bad, CHANGE))
    form.setFontStrikeOut(not is_added)
    form.setFontWeight(QFont.Weight.DemiBold if is_added else QFont.Weight.Normal)
    return form


def _merged(kinds: Sequence[object], ends: Sequence[int]) -> Iterable[tuple[object, int, int]]:
    """(kind, start, end) of each run of equal neighbours."""
    start = 0
    for at, (kind, end) in enumerate(zip(kinds, ends, strict=False)):
        if at + 1 == len(kinds) or kinds[at + 1] != kind:
            yield kind, start, end
            start = end


def _units(text: str) -> int:
    """The length that a document counts: UTF-16 units, two for an emoji."""
    return len(text) + sum(ord(letter) > 0xFFFF for letter in text)


# ── word diff ────────────────────────────────────────────────────────────────────────────────────────────────────────

# The difference between two texts, word by word.

Part = tuple[Literal["same", "removed", "added"], str]

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
"""Runs of white space, words, and single signs: in sums and tags a sign is what differs."""
MOST_WORDS = 6000
"""Words of the two texts together above which whole lines are compared: the time grows with the square."""


def diff(old: str, new: str) -> list[Part]:
    """What becomes of `old` in `new`, in order; the parts that are not added make up `old`, those not removed `new`."""
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
            parts.append(("removed", "".join(middle[0][a:b])))
            parts.append(("added", "".join(middle[1][c:d])))
    parts.append(("same", "".join(first[len(first) - tail :])))
    return [part for part in parts if part[1]]


# ── folding ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# The parts of a completion between tags, and the text with some of them folded away.

FOLDABLE = {"think": "Thinking", "answer": "Answer"}
"""Tag → the name of what is between its opening and its closing one."""


def fold(text: str, tags: Iterable[str]) -> str:
    """`text` with what is between these tags replaced by the number of its words. A tag that is never closed goes on to the end."""
    for tag in tags:
        text = re.sub(rf"(<{tag}>)(.*?)(</{tag}>|\Z)", _folded, text, flags=re.DOTALL)
    return text


def has_tag(text: str, tag: str) -> bool:
    return f"<{tag}>" in text


def _folded(match: re.Match[str]) -> str:
    words = len(match[2].split())
    return f"{match[1]} … {words:,} {'word' if words == 1 else 'words'} … {match[3]}"


# ── reading pane ─────────────────────────────────────────────────────────────────────────────────────────────────────

NOT_RECORDED = "This run did not record its tokens. Record tokens, an advanced setting of the training, does."
NOT_LEARNED = (
    "No update saw this completion, because nothing of it could move the policy; it has what was sampled alone."
)
CHANGES = "Added words are bold and green, removed ones are struck out and red."
SAME_TEXT = "The two texts are the same."
TokenLoader = Callable[[], Mapping[str, Any] | None]


class ReadingPane(CompletionPane):
    """Signals:
    setting_requested(str) – go to this setting.
    """

    setting_requested = Signal(str)

    def __init__(self, title: str, parent: QWidget | None = None) -> None:
        self._load_tokens: TokenLoader = lambda: None
        self._pair: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        super().__init__(title, parent)
        self._own_title = title
        self.marks = MarkedText(self.text)
        self.folds = {tag: CheckBox(f"Fold {name.lower()}") for tag, name in FOLDABLE.items()}
        self.measure = ComboBox()
        self.measure.setAccessibleName("Colour tokens by")
        self.measure.addItem("Tokens not coloured", "")
        for place, measure in enumerate(MEASURES, 1):
            self.measure.addItem(measure.label, measure.key)
            self.measure.setItemData(place, measure.sentence, Qt.ItemDataRole.ToolTipRole)
        self.measure.setMinimumContentsLength(22)
        self.legend = TokenLegend()
        self.told = label(font=theme.caption_font(), role="caption", wrap=True)
        self.setting = LinkButton("Go to the setting")
        self.setting.clicked.connect(lambda _checked=False: self.setting_requested.emit("record_tokens"))
        for box in self.folds.values():
            box.toggled.connect(lambda _checked: self._show_text())
        self.measure.currentIndexChanged.connect(lambda _index: self._show_text())
        self._lay_out_bar()

    def _lay_out_bar(self) -> None:
        bar, below = QHBoxLayout(), QHBoxLayout()
        for row in (bar, below):
            row.setSpacing(2 * theme.SPACE)
        for box in self.folds.values():
            bar.addWidget(box)
        bar.addStretch(1)
        bar.addWidget(self.legend)
        bar.addWidget(self.measure)
        below.addWidget(self.told, 1)
        below.addWidget(self.setting)
        for part in (self.legend, self.told, self.setting):
            part.hide()
        column = self.layout()
        assert isinstance(column, QVBoxLayout)
        column.insertLayout(column.count() - 1, bar)
        column.insertLayout(column.count() - 1, below)

    # ── what is shown ───────────────────────────────────────────────────────────────────────────

    def set_token_loader(self, load_tokens: TokenLoader) -> None:
        """What reads the tokens of the completion that is shown next; it is called only when they are to be coloured."""
        self._load_tokens = load_tokens

    def show_completion(self, completion: Mapping[str, Any] | None) -> None:
        self._pair = None
        super().show_completion(completion)
        self.set_title(self._own_title)
        self._show_text()

    def show_difference(self, first: Mapping[str, Any], second: Mapping[str, Any], title: str) -> None:
        """Show what the second completion changes of the first."""
        super().show_completion(second)
        self._pair = (first, second)
        self.set_title(title)
        self._result.setText(f"Reward {figure(first.get('reward'))} → <b>{figure(second.get('reward'))}</b>")
        self._show_text()

    def _recolour(self) -> None:
        pair, title = self._pair, self._title.text()
        super()._recolour()
        if pair is not None:
            self.show_difference(*pair, title)
        self.legend.update()

    def _show_text(self) -> None:
        if (
            not hasattr(self, "folds") or self._completion is None
        ):  # the base class shows nothing while it is being built
            return
        text = _text_of(self._completion)
        tokens = None if self._pair else self._tokens()
        for tag, box in self.folds.items():
            set_shown(box, has_tag(text, tag) and not self._pair)
            box.setEnabled(tokens is None)  # a token has no place in a text that is folded
        set_shown(self.measure, self._pair is None)
        if self._pair:
            parts = diff(*map(_text_of, self._pair))
            self._tell(SAME_TEXT if all(kind == "same" for kind, _ in parts) else CHANGES)
            self._set(text="".join(part for _, part in parts))
            self.marks.show_difference(parts)
        elif tokens is not None:
            self._set("".join(tokens.texts))
            self.marks.show_tokens(tokens)
        else:
            self._set(fold(text, [tag for tag, box in self.folds.items() if box.isChecked()]))
            self.marks.clear()
        self.legend.show_tokens(tokens)

    def _set(self, text: str) -> None:
        if self.text.toPlainText() != text:  # setting it again would scroll to the top and drop the selection
            self.text.setPlainText(text)

    def _tokens(self) -> ColouredTokens | None:
        """The tokens as they are to be coloured; None, and told why, where there are none."""
        key = self.measure.currentData()
        measure = next((measure for measure in MEASURES if measure.key == key), None)
        data = self._load_tokens() if measure else None
        found = coloured(measure, data, (self._completion or {}).get("advantage")) if measure and data else None
        self._tell("" if found or not measure else NOT_LEARNED if data else NOT_RECORDED)
        self.measure.setToolTip(measure.sentence if measure else "")
        return found

    def _tell(self, sentence: str) -> None:
        self.told.setText(sentence)
        set_shown(self.told, bool(sentence))
        set_shown(self.setting, sentence == NOT_RECORDED)


class TokenLegend(QWidget):
    """A strip of the colours from one end to the other, with the values of both ends and the unit."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._tokens: ColouredTokens | None = None
        self.setFont(theme.figures_font(theme.CAPTION))
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)

    def show_tokens(self, tokens: ColouredTokens | None) -> None:
        """Show the scale of these tokens; None hides the legend."""
        self._tokens = tokens
        set_shown(self, tokens is not None)
        if tokens is not None:
            self.setAccessibleName(f"{tokens.measure.label}: colours from {self._ends[0]} to {self._ends[1]}")
        self.updateGeometry()
        self.update()

    @property
    def _range(self) -> tuple[float, float]:
        """The strengths that occur: a log-probability is never above zero, and a mark never below."""
        known = [x for x in (self._tokens.strengths if self._tokens else ()) if x is not None]
        return (-1.0 if min(known, default=0) < 0 else 0.0), (1.0 if max(known, default=0) > 0 else 0.0)

    @property
    def _ends(self) -> tuple[str, str]:
        if self._tokens is None:
            return "", ""
        (low, high), (left, right) = self._range, self._tokens.ends
        unit, middle = self._tokens.measure.unit, figure(self._tokens.measure.middle)
        return (left if low else middle), f"{right if high else middle} {unit}".strip()

    def sizeHint(self) -> QSize:
        texts = sum(self.fontMetrics().horizontalAdvance(text) for text in self._ends)
        return QSize(texts + theme.scaled(96) + 2 * theme.SPACE, theme.scaled(18))

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._tokens is None:
            return
        painter = QPainter(self)
        left, right = self._ends
        painter.setPen(theme.palette().text)
        centre = Qt.AlignmentFlag.AlignVCenter
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignLeft | centre, left)
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignRight | centre, right)
        start = self.fontMetrics().horizontalAdvance(left) + theme.SPACE
        end = self.width() - self.fontMetrics().horizontalAdvance(right) - theme.SPACE
        strip = QRectF(start, 3, max(0, end - start), self.height() - 6)
        gradient = QLinearGradient(strip.topLeft(), strip.topRight())
        low, high = self._range
        for at in (0.0, 0.5, 1.0):
            gradient.setColorAt(at, background(self._tokens.measure, low + (high - low) * at))
        painter.fillRect(strip, gradient)
        painter.setPen(theme.palette().outline)
        painter.drawRect(strip)


def _text_of(completion: Mapping[str, Any]) -> str:
    text = completion.get("text")
    return visible(text) if isinstance(text, str) else ""
