"""Rows that are decoded together: keys and values in arrays of fixed capacity, one column a step; rows come and go.

Knows columns, padding and ages; no model, no sampling, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from backend.spec.memory.chunking import capacity

# ── rows that wait ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Prefilled:
    """Prompts that have been read, padded on the left: logits after the last token [P, V], keys and values by layer
    [P, heads, columns, head_dim], padding [P]."""

    logits_PV: mx.array
    keys: list[mx.array]
    values: list[mx.array]
    pad_P: np.ndarray

    @property
    def columns(self) -> int:
        return self.keys[0].shape[2]


@dataclass(slots=True)
class Admissions:
    """Rows about to be decoded: the completion that each becomes, and the prompt of `source` from which it goes on."""

    source: Prefilled
    index: np.ndarray
    prompt: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.source.columns - self.source.pad_P[self.prompt]

    def logits(self) -> mx.array:
        return self.source.logits_PV[mx.array(self.prompt)]


class WaitingQueue:
    """Completions that wait to be decoded, group by group. A prompt is read when the first of its group is due, once."""

    def __init__(self, prompts: Sequence[list[int]], G: int, read: Callable[[list[list[int]]], Prefilled]) -> None:
        self._prompts, self._G, self._read = prompts, G, read
        self._next = 0
        self._source: Prefilled | None = None
        self._sourced = range(0)
        """The prompts in `_source`."""

    @property
    def waiting(self) -> int:
        return len(self._prompts) * self._G - self._next

    def take(self, count: int) -> list[Admissions]:
        """The next `count` rows, in as few pieces as they have been read in."""
        pieces: list[Admissions] = []
        while count:
            piece = self._piece(count)
            pieces.append(piece)
            count -= len(piece.index)
        return pieces

    def _piece(self, count: int) -> Admissions:
        first = self._next // self._G
        if first not in self._sourced:
            self._sourced = range(first, min(len(self._prompts), (self._next + count - 1) // self._G + 1))
            self._source = self._read([self._prompts[p] for p in self._sourced])
        assert self._source is not None
        index = np.arange(self._next, min(self._next + count, self._sourced.stop * self._G))
        self._next += len(index)
        piece = Admissions(self._source, index, index // self._G - self._sourced.start)
        if self._next == self._sourced.stop * self._G:
            self._source = None  # its keys and values have been handed on
        return piece


# ── rows at work ─────────────────────────────────────────────────────────────────────────────────────────────────────


class KVRows:
    """The rows that are being decoded. All write into the same column, `slot`; each is padded on the left."""

    def __init__(self) -> None:
        self.index = np.zeros(0, np.int64)
        """Which completion each row is."""
        self.age = np.zeros(0, np.int64)
        """Tokens drawn so far in each."""
        self.pad = np.zeros(0, np.int64)
        self.slot = 0
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.pad_B = mx.zeros(0, mx.int32)
        self.place_C = mx.zeros(0, mx.int32)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def lengths(self) -> np.ndarray:
        return self.slot - self.pad

    @property
    def columns(self) -> int:
        return self.place_C.size

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def spare(self, alive: np.ndarray) -> int:
        """Columns on the left that none of these rows uses."""
        return int(self.pad[alive].min(initial=self.slot))

    def relay(self, keep: np.ndarray, alive: int, entrants: Sequence[Admissions], room: int) -> None:
        """Lay the rows `keep` and then the entrants into new arrays, right-aligned, with room for so many more columns.

        The first `alive` of `keep` and the entrants decide how long they are; the rest only fills the number up, and
        loses what is longer. Layer by layer, so that one layer is held twice and not all.
        """
        lengths = [self.lengths[keep][:alive], *(entrant.lengths for entrant in entrants)]
        slot = int(np.concatenate(lengths).max())
        columns = capacity(slot + room)
        whole = len(keep) == len(self) and (keep == np.arange(len(self))).all()
        kept = None if whole else mx.array(keep)

        def laid(old: list[mx.array], come: list[list[mx.array]], layer: int) -> mx.array:
            pieces = [_aligned(_rows(old[layer][:, :, : self.slot], kept), slot, columns)] if len(keep) else []
            for entrant, arrays in zip(entrants, come, strict=True):
                pieces.append(_aligned(_rows(arrays[layer], mx.array(entrant.prompt)), slot, columns))
            return mx.concatenate(pieces) if len(pieces) > 1 else pieces[0]

        layers = len(self.keys or entrants[0].source.keys)
        olds, news = (self.keys, self.values), ([None] * layers, [None] * layers)
        come = [[e.source.keys for e in entrants], [e.source.values for e in entrants]]
        for layer in range(layers):
            for old, new, each in zip(olds, news, come, strict=True):
                new[layer] = laid(old, each, layer)  # pyright: ignore
                if old:
                    old[layer] = None  # pyright: ignore
            mx.eval(news[0][layer], news[1][layer])
        self.keys, self.values = news  # pyright: ignore
        self._renumber(keep, entrants, slot, columns)

    def _renumber(self, keep: np.ndarray, entrants: Sequence[Admissions], slot: int, columns: int) -> None:
        lengths = np.concatenate([self.lengths[keep], *(entrant.lengths for entrant in entrants)])
        self.index = np.concatenate([self.index[keep], *(entrant.index for entrant in entrants)])
        self.age = np.concatenate([self.age[keep], *(np.ones_like(entrant.index) for entrant in entrants)])
        self.pad = np.maximum(slot - lengths, 0)
        self.slot, self.pad_B, self.place_C = slot, mx.array(self.pad.astype(np.int32)), mx.arange(columns)


def _rows(array: mx.array, chosen: mx.array | None) -> mx.array:
    return array if chosen is None else array[chosen]


def _aligned(filled: mx.array, slot: int, columns: int) -> mx.array:
    """Its last column at slot − 1, within so many columns; what is too long loses columns on the left."""
    over = filled.shape[2] - slot
    filled = filled[:, :, max(over, 0) :]
    return mx.pad(filled, [(0, 0), (0, 0), (max(-over, 0), columns - slot), (0, 0)])
