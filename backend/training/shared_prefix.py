"""Prompts read once for completions that go through the model at different times.

Rows of one prompt may not fit into memory together. Reading the prompt for each of them again would undo what sharing gains, so
the pass is parted: the prompts are read first, without gradient; each micro-batch starts from their keys and values, and leaves
its slopes in them; in the end the prompts are gone through once more, and all those slopes are taken back through them at once.
By the chain rule this is the same gradient. Knows micro-batches and a model; no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from backend.engine.forward import PrefilledPrompts, SequenceRows, prefill_prompts
from backend.engine.split_model import SplitModel


class MicroBatchLike(Protocol):
    """What is read of a micro-batch: `groups` are its prompts' numbers in the step, in the order of its rows."""

    @property
    def rows(self) -> SequenceRows: ...
    @property
    def groups(self) -> list[int]: ...


class SharedPrefix:
    """The prompts of some micro-batches, read at most `token_budget` tokens at a time."""

    def __init__(self, parts: Sequence[MicroBatchLike], token_budget: int) -> None:
        prompts: dict[int, tuple[np.ndarray, int]] = {}
        for part in parts:
            lengths = np.zeros(len(part.groups), np.int64)
            lengths[np.array(part.rows.prompt_B)] = np.array(part.rows.prompt_length_B)
            prompts |= zip(part.groups, zip(np.array(part.rows.prompt_PK), lengths.tolist(), strict=True), strict=True)
        longest = max(part.rows.prompt_PK.shape[1] for part in parts)
        self.place = {group: place for place, group in enumerate(prompts)}
        self.prompt_PK = mx.array(np.stack([np.pad(ids, (0, longest - len(ids))) for ids, _ in prompts.values()]))
        self.length_P = mx.array([length for _, length in prompts.values()])
        self._slopes: PrefilledPrompts | None = None
        step = max(1, token_budget // longest)
        self.spans = [slice(start, start + step) for start in range(0, len(prompts), step)]

    @staticmethod
    def pays(parts: Sequence[MicroBatchLike], token_budget: int) -> bool:
        """Whether it saves more than the one pass over the prompts that it costs, a third of reading them with gradient; or
        whether a part is too large with its prompts in it."""
        if any(part.rows.completion_BT.size + part.rows.prompt_PK.size > token_budget for part in parts):
            return True
        sizes = [(group, part.rows.prompt_PK.shape[1]) for part in parts for group in part.groups]
        return 3 * (sum(size for _, size in sizes) - sum(dict(sizes).values())) > sum(dict(sizes).values())

    def read(self, split_model: SplitModel) -> PrefilledPrompts:
        """All prompts, without gradient."""
        pieces: list[PrefilledPrompts] = []
        for span in self.spans:
            pieces.append(prefill_prompts(split_model, self.prompt_PK[span], self.length_P[span]))
            mx.eval(*pieces[-1])
        return pieces[0] if len(pieces) == 1 else _each(lambda *x: mx.concatenate(list(x)), *pieces)

    def given(self, read: PrefilledPrompts, part: MicroBatchLike) -> PrefilledPrompts:
        """The prompts of a micro-batch, as `prefill_prompts` would give them."""
        index_P, K = self._index(part), part.rows.prompt_PK.shape[1]
        return _each(lambda x: x[index_P, :, :K] if x.ndim == 4 else x[index_P], read)

    def add(self, part: MicroBatchLike, slopes: PrefilledPrompts) -> None:
        """Note the slopes that a micro-batch has found in its prompts."""
        index_P, K, P = self._index(part), part.rows.prompt_PK.shape[1], len(self.place)
        longest = self.prompt_PK.shape[1]

        def widened(slope: mx.array) -> mx.array:
            room = [(0, 0), (0, 0), (0, longest - K), (0, 0)] if slope.ndim == 4 else 0
            return mx.zeros((P, *mx.pad(slope, room).shape[1:]), slope.dtype).at[index_P].add(mx.pad(slope, room))

        found = _each(widened, slopes)
        self._slopes = found if self._slopes is None else _each(mx.add, self._slopes, found)
        mx.eval(*self._slopes)

    def pulled_back(self, model: nn.Module, split_model: SplitModel, total: Any) -> Any:
        """`total` with the share of the gradient that comes through the prompts, all slopes taken back at once."""
        assert self._slopes is not None
        for span in self.spans:
            here = _each(lambda x, span=span: x[span], self._slopes)

            def along(span: slice = span, here: PrefilledPrompts = here) -> mx.array:
                read = prefill_prompts(split_model, self.prompt_PK[span], self.length_P[span])
                last, keys, values = _each(lambda x, slope: (x * slope).astype(mx.float32).sum(), read, here)
                return last + sum(keys) + sum(values)

            _, grads = nn.value_and_grad(model, along)()
            total = tree_map(mx.add, total, grads)
            mx.eval(total)
        return total

    def _index(self, part: MicroBatchLike) -> mx.array:
        return mx.array([self.place[group] for group in part.groups])


def _each(change: Callable[..., mx.array], *read: PrefilledPrompts) -> PrefilledPrompts:
    """Array by array."""
    last, keys, values = zip(*read, strict=True)
    return PrefilledPrompts(
        change(*last), [change(*x) for x in zip(*keys, strict=True)], [change(*x) for x in zip(*values, strict=True)]
    )
