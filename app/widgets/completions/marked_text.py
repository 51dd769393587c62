"""A pane of text with parts of it marked: tokens by a number, or what differs from another text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from PySide6.QtCore import QEvent, QObject
from PySide6.QtGui import QFont, QHelpEvent, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QPlainTextEdit, QTextEdit, QToolTip

from app import theme
from app.widgets.basic.number_format import figure
from app.widgets.completions.token_colours import ColouredTokens, background, blend

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
