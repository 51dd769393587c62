"""Tokens to text as they are sampled: a piece never ends inside a character. New tokens are decoded together with the
last shown piece, since a token's text may depend on the one before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # an incomplete character, decoded


class TextStream:
    """`push` takes a token and returns the text that it completes; `rest` what was still held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []  # tokens of the last shown piece
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._new_text()
        return "" if text.endswith(REPLACEMENT) else self._show(text)

    def rest(self) -> str:
        return self._show(self._new_text())

    def _new_text(self) -> str:
        before = self._decode(self._shown) if self._shown else ""
        return self._decode([*self._shown, *self._held])[len(before) :] if self._held else ""

    def _show(self, text: str) -> str:
        if text:  # a token without text of its own stays held: what follows may need it as context
            self._shown, self._held = self._held, []
        return text
