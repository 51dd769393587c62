"""The rows of a decode batch and their queue. A layer holds keys and values [B, heads, C, head_dim] of fixed capacity,
or both in `keys` as [B, heads, 2, C, head_dim]. Rows are left-padded, so that all write the same column, `slot`; row b
is real in the columns pad[b] … slot − 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.chunk_sizes import capacity


@dataclass(slots=True)
class Prefilled:
    """Left-padded prompts after prefill: logits after the last token [P, V], keys and values by layer [P, heads,
    columns, head_dim], padding [P]. `values` is empty where `keys` holds both."""

    logits_PV: mx.array
    keys: list[mx.array]
    values: list[mx.array]
    pad_P: np.ndarray

    @property
    def columns(self) -> int:
        return self.keys[0].shape[-2]


@dataclass(slots=True)
class AdmittedRows:
    """Rows about to join the batch: the completion `index` of each, and its prompt's row in `prefilled`."""

    prefilled: Prefilled
    index: np.ndarray
    prompt: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.prefilled.columns - self.prefilled.pad_P[self.prompt]

    def logits(self) -> mx.array:
        return self.prefilled.logits_PV[mx.array(self.prompt)]


class WaitingQueue:
    """Completions that wait for a row, G to a prompt, in order. A prompt is prefilled once, when the first completion
    of its group is admitted, with the others admitted then."""

    def __init__(self, prompts: Sequence[list[int]], G: int, prefill: Callable[[list[list[int]]], Prefilled]) -> None:
        self._prompts, self._G, self._prefill = prompts, G, prefill
        self._next = 0
        self._prefilled: Prefilled | None = None
        self._prefilled_prompts = range(0)

    @property
    def waiting(self) -> int:
        return len(self._prompts) * self._G - self._next

    def admit(self, count: int) -> list[AdmittedRows]:
        """The next `count` completions, one `AdmittedRows` for each prefill that they come from."""
        admissions: list[AdmittedRows] = []
        # A group that the previous call began has its prefill still; the rest of `count` may need a new one.
        while count:
            first = self._next // self._G
            if first not in self._prefilled_prompts:
                # All prompts that this admission reaches in one pass: fewer, larger products than one by one.
                last = (self._next + count - 1) // self._G
                self._prefilled_prompts = range(first, min(len(self._prompts), last + 1))
                self._prefilled = self._prefill([self._prompts[p] for p in self._prefilled_prompts])
            assert self._prefilled is not None
            end = self._prefilled_prompts.stop * self._G
            index = np.arange(self._next, min(self._next + count, end))
            admissions.append(AdmittedRows(self._prefilled, index, index // self._G - self._prefilled_prompts.start))
            self._next += len(index)
            count -= len(index)
            if self._next == end:
                self._prefilled = None  # the last rows are admitted: free the arrays as soon as those are copied
        return admissions


class KVRows:
    """Keys, values and bookkeeping of the decoded rows."""

    def __init__(self) -> None:
        self.index = np.zeros(0, np.int64)  # the completion of each row
        self.generated = np.zeros(0, np.int64)  # tokens sampled in each row
        self.pad = np.zeros(0, np.int64)
        self.slot = 0  # the next token's column
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.pad_B = mx.zeros(0, mx.int32)  # `pad` on the device
        self.column_C = mx.zeros(0, mx.int32)  # 0 … C − 1 on the device

    def __len__(self) -> int:
        return len(self.index)

    @property
    def lengths(self) -> np.ndarray:
        return self.slot - self.pad

    @property
    def capacity(self) -> int:
        return self.column_C.size

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def unused_columns(self, alive: np.ndarray) -> int:
        """Columns on the left that are padding in all of these rows."""
        return int(self.pad[alive].min(initial=self.slot))

    def compact(self, keep: np.ndarray, alive: int, admissions: Sequence[AdmittedRows], free_columns: int) -> None:
        """Copy the rows `keep` and the admitted ones into new arrays, right-aligned, with `free_columns` after them.
        `slot` becomes the longest length among the first `alive` of `keep` and the admitted; the other rows of `keep`
        have ended and only fill up the row count."""
        # Columns can move freely: positions are baked into rotated keys, and count from a row's first real token
        # (slot − pad), which shifting does not change.
        lengths = [self.lengths[keep][:alive], *(admitted.lengths for admitted in admissions)]
        slot = int(np.concatenate(lengths).max())
        columns = capacity(slot + free_columns)
        # With every row kept in order a slice will do; a gather would copy the layer once more.
        keeps_all = len(keep) == len(self) and (keep == np.arange(len(self))).all()

        def compacted(old: list[mx.array], admitted: list[list[mx.array]], layer: int) -> mx.array:
            filled = old[layer][..., : self.slot, :] if len(keep) else mx.zeros(0)
            pieces = [_aligned(filled if keeps_all else filled[mx.array(keep)], slot, columns)] if len(keep) else []
            for source, arrays in zip(admissions, admitted, strict=True):
                pieces.append(_aligned(arrays[layer][mx.array(source.prompt)], slot, columns))
            return mx.concatenate(pieces) if len(pieces) > 1 else pieces[0]

        layers = len(self.keys or admissions[0].prefilled.keys)
        has_values = bool(self.values or (admissions and admissions[0].prefilled.values))
        olds, prefilled = [self.keys], [[admitted.prefilled.keys for admitted in admissions]]
        if has_values:
            olds, prefilled = [*olds, self.values], [*prefilled, [admitted.prefilled.values for admitted in admissions]]
        news: list[list[Any]] = [[None] * layers for _ in olds]
        # Evaluated layer by layer, dropping the old arrays as it goes: at most one layer is in memory twice.
        for layer in range(layers):
            for old, new, admitted in zip(olds, news, prefilled, strict=True):
                new[layer] = compacted(old, admitted, layer)
                if old:
                    old[layer] = None  # pyright: ignore
            mx.eval([new[layer] for new in news])
        self.keys, self.values = news if has_values else (*news, [])
        lengths = np.concatenate([self.lengths[keep], *(admitted.lengths for admitted in admissions)])
        self.index = np.concatenate([self.index[keep], *(admitted.index for admitted in admissions)])
        # An admitted row has one token already, sampled from the prefill's last logits.
        self.generated = np.concatenate([self.generated[keep], *(np.ones_like(a.index) for a in admissions)])
        # Ended rows may be longer than `slot`: their padding is 0, not negative.
        self.pad = np.maximum(slot - lengths, 0)
        self.slot, self.pad_B, self.column_C = slot, mx.array(self.pad.astype(np.int32)), mx.arange(columns)


def _aligned(filled: mx.array, slot: int, columns: int) -> mx.array:
    excess = filled.shape[-2] - slot
    filled = filled[..., max(excess, 0) :, :]
    return mx.pad(filled, [(0, 0)] * (filled.ndim - 2) + [(max(-excess, 0), columns - slot), (0, 0)])
