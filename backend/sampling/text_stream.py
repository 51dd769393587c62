"""Tokens to text, piece by piece, as they are sampled: a piece never ends inside a character.

A token may hold a part of a character, and the text of a token may depend on the one before it (a leading space, in
tokenizers of the SentencePiece kind). So new tokens are decoded together with the last shown piece, and shown once
their text ends in a whole character. Bytes that never become one, which a badly trained model may write, are shown with
the next sound character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""An incomplete character, decoded."""


class TextStream:
    """`push` takes a token and returns the text that is new with it; `rest` what was still held back at the end."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []
        """The tokens of the last shown piece: the context of the next one."""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes, "" while it is incomplete."""
        self._held.append(token)
        text = self._new_text()
        return "" if text.endswith(REPLACEMENT) else self._show(text)

    def rest(self) -> str:
        """The text of the tokens that are still held back, however it ends."""
        return self._show(self._new_text())

    def _new_text(self) -> str:
        before = self._decode(self._shown) if self._shown else ""
        return self._decode([*self._shown, *self._held])[len(before) :] if self._held else ""

    def _show(self, text: str) -> str:
        if text:  # a token without text of its own stays held: what follows may need it as context
            self._shown, self._held = self._held, []
        return text
