"""What has been drawn so far: tokens and their log-probabilities, and where each completion ends. Host arrays only.

The text decides about stop strings; an end-of-sequence id and the length limit need no text. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from backend.types import Completion, Stop

OPEN = -1
REASONS: tuple[Stop, ...] = get_args(Stop)
EOS, LENGTH, STRING = (REASONS.index(reason) for reason in ("eos", "length", "string"))


class Outputs:
    """`count` completions being drawn, of at most `max_tokens`. `drawn` tokens stand in all of them together."""

    def __init__(
        self, count: int, max_tokens: int, tokenizer: Any, eos_ids: Sequence[int], stop: Sequence[str]
    ) -> None:
        self.max_tokens, self.tokenizer, self.stop_strings = max_tokens, tokenizer, tuple(stop)
        self._eos = np.array(eos_ids)
        self._reach = 8 + 2 * max((len(word.encode()) for word in stop), default=0)
        self._tokens = np.zeros((count, 0), np.int32)
        self._logps = np.zeros((count, 0), np.float32)
        self._kept = np.zeros((count, 0), np.float32)
        self.length = np.zeros(count, np.int64)
        self.stop = np.full(count, OPEN, np.int8)

    @property
    def drawn(self) -> int:
        return int(self.length.sum())

    def read(self, index: np.ndarray, tokens_NB: np.ndarray, logps_NB: np.ndarray, kept_NB: np.ndarray) -> None:
        """Append the next N tokens of the completions `index`, each up to where it ends; those that ended take nothing."""
        is_open = self.stop[index] == OPEN
        index, tokens = index[is_open], tokens_NB.T[is_open]
        start, N = self.length[index], tokens.shape[1]
        if not len(index):
            return
        is_eos = np.isin(tokens, self._eos)
        before_eos = np.where(is_eos.any(axis=1), is_eos.argmax(axis=1) + 1, N)
        taken = np.minimum(before_eos, self.max_tokens - start)
        self._write(index, start, taken, (tokens, logps_NB.T[is_open], kept_NB.T[is_open]))
        self.length[index] = start + taken
        ended = is_eos[np.arange(len(index)), taken - 1]
        self.stop[index] = np.where(ended, EOS, np.where(self.length[index] >= self.max_tokens, LENGTH, OPEN))
        if self.stop_strings:
            for row, first in zip(index.tolist(), start.tolist(), strict=True):
                self._cut_at_stop_string(row, first)

    def _write(self, index: np.ndarray, start: np.ndarray, taken: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        self._widen(int((start + taken).max()))
        inside = np.arange(parts[0].shape[1])[None] < taken[:, None]
        row, place = np.nonzero(inside)
        for store, part in zip((self._tokens, self._logps, self._kept), parts, strict=True):
            store[index[row], start[row] + place] = part[inside]

    def _widen(self, length: int) -> None:
        more = max(64, self._tokens.shape[1]) if length > self._tokens.shape[1] else 0
        if more:
            pad = ((0, 0), (0, more))
            self._tokens, self._logps = np.pad(self._tokens, pad), np.pad(self._logps, pad)
            self._kept = np.pad(self._kept, pad)

    # ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _cut_at_stop_string(self, row: int, first: int) -> None:
        if (cut := self._stop_string_end(row, first)) is not None:
            self.length[row], self.stop[row] = cut, STRING

    def _stop_string_end(self, row: int, first: int) -> int | None:
        """The number of tokens after which the text first contains a stop string. Text, not ids, is compared: the same
        words may be merged into other tokens. A token has a byte or more, so the new ones' neighbourhood is looked at
        before the whole."""
        tokens = self._text_tokens(row)
        if not self._holds_stop_string(tokens[max(0, first - self._reach) :]) or not self._holds_stop_string(tokens):
            return None
        ends = range(first + 1, int(self.length[row]) + 1)
        return next((end for end in ends if self._holds_stop_string(self._tokens[row, :end].tolist())), None)

    def _holds_stop_string(self, tokens: list[int]) -> bool:
        text = self._decoded(tokens)
        return any(word in text for word in self.stop_strings)

    def _text_tokens(self, row: int) -> list[int]:
        return self._tokens[row, : self.length[row] - (self.stop[row] == EOS)].tolist()

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def parts(self, row: int) -> tuple[list[int], list[float], list[float]]:
        """Tokens, log-probabilities and the log of the mass kept."""
        tokens, logps, kept = (
            part[row, : self.length[row]].tolist() for part in (self._tokens, self._logps, self._kept)
        )
        return tokens, logps, kept

    def completion(self, row: int) -> Completion:
        assert self.stop[row] != OPEN
        tokens, logps, kept = self.parts(row)
        return Completion(tokens, logps, self._decoded(self._text_tokens(row)), REASONS[self.stop[row]], kept)
