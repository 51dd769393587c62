"""Syntax colours for Python: keywords, defined names, decorators, strings, numbers, comments.

One regular expression per line, not a parser: only triple-quoted strings are followed from line to line.
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
"""Block state of a line that ends inside a triple-quoted string → the quotes that close it."""


class PythonHighlighter(QSyntaxHighlighter):
    """Highlights a document, and again when the theme changes: formats hold colours, not palette roles."""

    def __init__(self, document: QTextDocument) -> None:
        super().__init__(document)
        theme.signals.changed.connect(self.rehighlight)

    def highlightBlock(self, text: str) -> None:
        self.setCurrentBlockState(0)
        fence = _FENCES.get(self.previousBlockState())
        position = self._format_string(text, 0, 0, fence) if fence else 0
        while position < len(text):
            match = _TOKENS.search(text, position)
            if match is None:
                return
            if match.lastgroup == "triple":
                position = self._format_string(text, match.start(), match.end(), match.group()[-3:])
            else:
                position = self._format_token(match)

    def _format_string(self, text: str, start: int, search_from: int, fence: str) -> int:
        """Format a string up to its closing fence, or to the end of the line if it has none there; returns the end."""
        close = text.find(fence, search_from)
        end = len(text) if close < 0 else close + 3
        self.setFormat(start, end - start, _char_format("triple"))
        if close < 0:
            self.setCurrentBlockState(next(state for state, each in _FENCES.items() if each == fence))
        return end

    def _format_token(self, match: re.Match[str]) -> int:
        kind = str(match.lastgroup)
        if kind == "word":
            word = match.group()
            kind = "constant" if word in _CONSTANTS else "keyword" if keyword.iskeyword(word) else ""
        if kind:
            self.setFormat(match.start(), match.end() - match.start(), _char_format(kind))
        return match.end()


def _char_format(kind: str) -> QTextCharFormat:
    made = QTextCharFormat()
    colour: QColor = getattr(theme.palette(), _ROLES[kind])
    made.setForeground(colour)
    if kind == "defined":
        made.setFontWeight(QFont.Weight.DemiBold)
    made.setFontItalic(kind == "comment")
    return made
