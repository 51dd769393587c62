"""Sampled tokens, their log-probabilities and where each completion ends: end-of-sequence id, length or stop string."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np

from backend.runs.completion_rows import Stop
from backend.sampling.grammar import GrammarState
from backend.types import Completion

OPEN, WAITING = -1, -2
REASONS: tuple[Stop, ...] = get_args(Stop)
EOS, LENGTH, STRING = (REASONS.index(reason) for reason in ("eos", "length", "string"))


class CompletionBuffer:
    """`count` completions in progress, of at most `max_tokens` tokens. `length` [count]: tokens so far; `limit`
    [count]: most tokens; `stop` [count]: an index into REASONS, OPEN, or WAITING for the results of tools. `held`: the
    grammar's states; a stop string then ends a completion only where the grammar is satisfied."""

    def __init__(
        self, count: int, max_tokens: int, tokenizer: Any, eos_ids: Sequence[int], stop: Sequence[str]
    ) -> None:
        self.max_tokens, self.tokenizer, self.stop_strings = max_tokens, tokenizer, tuple(stop)
        self.held: GrammarState | None = None
        self._eos = np.array(eos_ids)
        self._stop_window = 8 + 2 * max((len(word.encode()) for word in stop), default=0)
        self._tokens = np.zeros((count, 0), np.int32)
        self._logps, self._kept, self._held = (np.zeros((count, 0), np.float32) for _ in range(3))
        self._inserted: dict[int, list[range]] = {}  # places of tokens that were not sampled, by completion
        self.length = np.zeros(count, np.int64)
        self.limit = np.full(count, max_tokens)
        self.stop = np.full(count, OPEN, np.int8)

    @property
    def token_count(self) -> int:
        return int(self.length.sum())

    def append(
        self,
        index: np.ndarray,
        tokens_SB: np.ndarray,
        logps_SB: np.ndarray,
        kept_SB: np.ndarray,
        held_SB: np.ndarray | None = None,
        count_B: np.ndarray | None = None,
    ) -> None:
        """Append the next S tokens, or the first `count_B`, to the completions `index` [B], each up to its end."""
        is_open = self.stop[index] == OPEN
        index, tokens = index[is_open], tokens_SB.T[is_open]
        start, S = self.length[index], tokens.shape[1]
        if not len(index):
            return
        is_eos = self.is_eos(tokens)
        # argmax finds the first; the end-of-sequence token itself is kept, hence + 1.
        before_eos = np.where(is_eos.any(axis=1), is_eos.argmax(axis=1) + 1, S)
        limit = self.limit[index]
        added = np.minimum(before_eos, limit - start)
        if count_B is not None:
            added = np.minimum(added, count_B[is_open])
        logs = (logps_SB, kept_SB) if held_SB is None else (logps_SB, kept_SB, held_SB)
        self._widen(int((start + added).max()))
        inside = np.arange(S)[None] < added[:, None]
        row, column = np.nonzero(inside)
        parts = (tokens, *(part.T[is_open] for part in logs))
        for store, part in zip((self._tokens, self._logps, self._kept, self._held), parts, strict=False):
            store[index[row], start[row] + column] = part[inside]
        self.length[index] = start + added
        # The last *added* token decides: the length limit may have cut before an end-of-sequence token.
        ended = is_eos[np.arange(len(index)), added - 1]
        self.stop[index] = np.where(ended, EOS, np.where(self.length[index] >= limit, LENGTH, OPEN))
        if self.stop_strings:
            for row, first in zip(index.tolist(), start.tolist(), strict=True):
                if (end := self._stop_string_end(row, first)) is not None:
                    self.length[row], self.stop[row] = end, STRING

    def restart(self, row: int, limit: int) -> None:
        """Begin another completion of at most `limit` tokens in this place."""
        self.length[row], self.limit[row], self.stop[row] = 0, limit, OPEN

    def is_eos(self, tokens: np.ndarray) -> np.ndarray:
        return np.isin(tokens, self._eos)

    def insert(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not sample, and is not trained on."""
        start, end = int(self.length[row]), int(self.length[row]) + len(tokens)
        self._widen(end)
        self._tokens[row, start:end] = tokens
        self._inserted.setdefault(row, []).append(range(start, end))
        self.length[row] = end

    def _widen(self, longest: int) -> None:
        if longest > (width := self._tokens.shape[1]):
            pad = ((0, 0), (0, max(64, width, longest - width)))  # doubled, so appending takes amortised constant time
            stores = (np.pad(store, pad) for store in (self._tokens, self._logps, self._kept, self._held))
            self._tokens, self._logps, self._kept, self._held = stores

    def _stop_string_end(self, row: int, first: int) -> int | None:
        """Tokens after which the text first contains a stop string; None where it contains none. Text is compared, not
        ids; only the neighbourhood of the new tokens is decoded first."""
        tokens = self._text_tokens(row)
        if not self._has_stop_string(tokens[max(0, first - self._stop_window) :]) or not self._has_stop_string(tokens):
            return None
        ends = range(first + 1, int(self.length[row]) + 1)
        for end in ends:
            tokens = self._tokens[row, :end].tolist()
            if self.held is None:
                if self._has_stop_string(tokens):
                    return end
                continue
            # A stop string before the grammar is satisfied ends nothing, now or later.
            before, after = self._decode(tokens[:-1]), self._decode(tokens)
            is_new = any(after.count(word) > before.count(word) for word in self.stop_strings)
            if is_new and self.held.compiled.accepts(tokens):
                return end
        return None

    def cut_off_stuck(self) -> int:
        """Count completions that no token could continue as cut off; return how many."""
        assert self.held is not None
        stuck = [row for row in self.held.stuck if self.stop[row] == EOS]
        self.stop[stuck] = LENGTH
        return len(stuck)

    def _has_stop_string(self, tokens: list[int]) -> bool:
        text = self._decode(tokens)
        return any(word in text for word in self.stop_strings)

    def _text_tokens(self, row: int) -> list[int]:
        return self._tokens[row, : self.length[row] - (self.stop[row] == EOS)].tolist()

    def tokens(self, row: int, start: int = 0) -> list[int]:
        """Its tokens so far, from `start` on."""
        return self._tokens[row, start : self.length[row]].tolist()

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def arrays(self, row: int, start: int = 0) -> tuple[list[int], list[float], list[float]]:
        """Tokens, log-probabilities and log of the kept mass of one completion, from token `start` on."""
        tokens, logps, kept = (
            part[row, start : self.length[row]].tolist() for part in (self._tokens, self._logps, self._kept)
        )
        return tokens, logps, kept

    def completion(self, row: int) -> Completion:
        assert self.stop[row] >= 0
        tokens, logps, kept = self.arrays(row)
        held = self._held[row, : self.length[row]].tolist() if self.held is not None else []
        mask = [1] * len(tokens) if row in self._inserted else []
        for inserted in self._inserted.get(row, ()):
            for place in inserted:
                mask[place] = 0
        return Completion(tokens, logps, self.text(row), REASONS[self.stop[row]], kept, held, mask)

    def text(self, row: int, start: int = 0) -> str:
        """Its text from token `start` on, without the end-of-sequence token."""
        return self._decode(self._text_tokens(row)[start:])


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
        if text:  # a token without text stays held back: later ones may need it as context
            self._shown, self._held = self._held, []
        return text
