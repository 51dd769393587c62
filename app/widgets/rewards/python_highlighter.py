"""Python in the theme's colours: keywords, names being defined, decorators, strings, numbers, comments.

A highlighter by lines, not a parser: a string over several lines is followed, everything else is told by its looks.
"""

from __future__ import annotations

import keyword
import re

from PySide6.QtGui import QColor, QFont, QSyntaxHighlighter, QTextCharFormat, QTextDocument

from app import theme

_TOKENS = re.compile(
    r"""(?P<comment>\#.*)
    |(?P<triple>[rbfuRBFU]{0,2}(?:'''|\"\"\"))
    |(?P<string>[rbfuRBFU]{0,2}(?:'(?:\\.|[^'\\])*'?|"(?:\\.|[^"\\])*"?))
    |(?P<decorator>^\s*@[\w.]+)
    |(?P<defined>(?<=\bdef\ )\w+|(?<=\bclass\ )\w+)
    |(?P<number>\b(?:0[xob][\da-fA-F_]+|\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?)\b)
    |(?P<word>[A-Za-z_]\w*)""",
    re.VERBOSE,
)
_CONSTANTS = {"None", "True", "False"}
_ROLES = {
    "comment": "muted", "string": "good", "triple": "good", "decorator": "clip", "defined": "kl", "number": "length",
    "keyword": "accent", "constant": "length",
}  # fmt: skip
_FENCES = {1: "'''", 2: '"""'}
"""State of a line that ends inside a string → what closes it."""


class PythonHighlighter(QSyntaxHighlighter):
    """Colours a document; drawn again when the theme changes."""

    def __init__(self, document: QTextDocument) -> None:
        super().__init__(document)
        theme.signals.changed.connect(self.rehighlight)

    def highlightBlock(self, text: str) -> None:
        self.setCurrentBlockState(0)
        place = self._finish_string(text)
        while place < len(text):
            found = _TOKENS.search(text, place)
            if found is None:
                return
            place = self._begin_string(text, found) if found.lastgroup == "triple" else self._mark(found)

    def _finish_string(self, text: str) -> int:
        """Colour what is left of a string from the line before; where the line goes on after it."""
        fence = _FENCES.get(self.previousBlockState())
        return self._string(text, 0, 0, fence) if fence else 0

    def _begin_string(self, text: str, found: re.Match[str]) -> int:
        return self._string(text, found.start(), found.end(), found.group()[-3:])

    def _string(self, text: str, start: int, inside: int, fence: str) -> int:
        """Colour a string to its fence, or to the end of the line if it goes on after it; returns where it ended."""
        close = text.find(fence, inside)
        end = len(text) if close < 0 else close + 3
        self.setFormat(start, end - start, _look("triple"))
        if close < 0:
            self.setCurrentBlockState(next(state for state, each in _FENCES.items() if each == fence))
        return end

    def _mark(self, found: re.Match[str]) -> int:
        kind = str(found.lastgroup)
        if kind == "word":
            word = found.group()
            kind = "constant" if word in _CONSTANTS else "keyword" if keyword.iskeyword(word) else ""
        if kind:
            self.setFormat(found.start(), found.end() - found.start(), _look(kind))
        return found.end()


def _look(kind: str) -> QTextCharFormat:
    look = QTextCharFormat()
    colour: QColor = getattr(theme.palette(), _ROLES[kind])
    look.setForeground(colour)
    if kind == "defined":
        look.setFontWeight(QFont.Weight.DemiBold)
    look.setFontItalic(kind == "comment")
    return look
