"""KV caches of a compiled decoding step: arrays of fixed capacity C, of which a step writes one slot (column). Slot,
mask and positions are arrays too, so one trace serves all steps of a (rows, capacity)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from backend.engine.device import on_gpu


class StepContext:
    """State that all layers share in one decoding step. Rows are padded on the left, so all write the same `slot`;
    `position_B` is each row's own position."""

    def __init__(self, slot: mx.array, pad_B: mx.array, column_C: mx.array) -> None:
        self.slot, self.pad_B, self.column_C = slot, pad_B, column_C
        self.position_B = slot - pad_B  # RoPE counts from each row's first real token
        self._masks: dict[int, mx.array] = {}
        self._rotations: dict[int, mx.array] = {}
        # the residual stream after the last block, in float32 and as the model passes it on
        self.stream: tuple[mx.array, mx.array] | None = None

    def stream_of(self, x: mx.array) -> mx.array:
        """The stream that `x` is the rounded form of, or `x` itself."""
        return self.stream[0] if self.stream and self.stream[1] is x else x

    def mask(self, heads: int = 1) -> mx.array:
        """[B, heads, 1, C]: allows the columns between a row's padding and the slot. Metal copies a mask that heads
        share for each head and layer, so it is made once for all heads."""
        if heads not in self._masks:
            pad_B1 = self.pad_B[:, None]
            if heads > 1:
                pad_B1 = mx.broadcast_to(self.pad_B[:, None, None, None], (len(self.pad_B), heads, 1, 1))
            # `<=`: the step writes column `slot` before it attends. Later columns hold nothing yet, or a previous use's
            # numbers.
            mask = (self.column_C <= self.slot) & (self.column_C >= pad_B1)
            self._masks[heads] = mask if heads > 1 else mask[:, None, None]
        return self._masks[heads]

    def rotation(self, rope: Any, size: int) -> mx.array:
        """[B, 2, size] float32: a rotary embedding of halves turns x = (x₁, x₂) into x₁ ⊗ rotation[:, 0] + x₂ ⊗
        rotation[:, 1]. One call of `rope` serves queries and keys of all layers."""
        if id(rope) not in self._rotations:
            halves_B21d = _halves(len(self.pad_B), size)
            turned = rope(mx.stop_gradient(halves_B21d), offset=self.position_B)  # a copy: `rope` may change its input
            self._rotations[id(rope)] = turned.reshape(-1, 2, size)
        return self._rotations[id(rope)]


def _halves(B: int, size: int) -> mx.array:
    return mx.array(np.tile(np.repeat(np.eye(2, dtype=np.float32), size // 2, axis=1)[None, :, None], (B, 1, 1, 1)))


class SlotCache:
    """A layer's keys [B, J, C, d] and values [B, J, C, e] in mlx-lm's cache protocol."""

    def __init__(self, keys: mx.array, values: mx.array, step: StepContext) -> None:
        self.keys, self.values, self.step, self.offset = keys, values, step, step.position_B

    @property
    def mask(self) -> mx.array:
        return self.step.mask()

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.keys, self.values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = (
            written(old, new, self.step.slot) for old, new in ((self.keys, keys), (self.values, values))
        )
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.mask


class PackedSlotCache:
    """A layer's keys and values in one array [B, J, 2, C, d], for `DecodingBlock`. Metal's attention copies arrays
    whose (row, head) pairs lie at uneven distances; here they do not."""

    def __init__(self, kv: mx.array, step: StepContext) -> None:
        self.kv, self.step, self.offset = kv, step, step.position_B

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.kv,)

    def write(self, kv_BJ21d: mx.array) -> tuple[mx.array, mx.array]:
        """Write this step's column; return all C columns of keys and values, as views."""
        self.kv = written(self.kv, kv_BJ21d, self.step.slot)
        return self.kv[:, :, 0], self.kv[:, :, 1]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.step.mask()


def written(cache: mx.array, new: mx.array, slot: mx.array) -> mx.array:
    """`cache` [B, …, C, d] with `new` [B, …, 1, d] in column `slot`, in place if nothing else holds the array."""
    if on_gpu():  # one kernel; a slice update has another one compute the offset
        return mx.put_along_axis(cache, slot.reshape([1] * cache.ndim), new, axis=-2)
    return mx.slice_update(cache, new, slot, axes=(cache.ndim - 2,))


def new_prompt_cache(model: nn.Module) -> list[Any]:
    """Empty caches as the model itself makes them, else one KVCache per layer. Some wrappers (mistral3) do not pass
    mlx-lm's question on to their text model, which loses its sliding windows."""
    text_model: Any = getattr(model, "language_model", None)
    asks_text_model = not hasattr(model, "make_cache") and hasattr(text_model, "make_cache")
    return make_prompt_cache(text_model if asks_text_model else model)
