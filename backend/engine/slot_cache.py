"""The KV cache of a decoding step: arrays of fixed capacity, one slot written per step, for all rows at once."""

from __future__ import annotations

import mlx.core as mx


class SlotCache:
    """A layer's keys and values [B, heads, capacity, head_dim], written one slot a step.

    Position and mask are arrays, so a compiled step serves every position of its capacity. It speaks mlx-lm's cache
    protocol: `offset` is each row's own position (its left padding taken off), for the rotary embedding.
    """

    def __init__(self, keys: mx.array, values: mx.array, slot: mx.array, mask: mx.array, offset_B: mx.array) -> None:
        self.keys, self.values, self.slot, self.mask, self.offset = keys, values, slot, mask, offset_B

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self.slot, axes=(2,))
        self.values = mx.slice_update(self.values, values, self.slot, axes=(2,))
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.mask
