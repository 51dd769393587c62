"""The KV cache of a compiled decoding step: arrays of fixed capacity C, of which a step writes one slot (column).

mlx-lm's own caches keep their length as a Python integer and grow by concatenation, so `mx.compile` would trace the step again
for every token. Here the slot, the mask and the positions are arrays: one trace serves every step of a (rows, capacity).
"""

from __future__ import annotations

import mlx.core as mx


class SlotCache:
    """A layer's keys [B, J, C, d] and values [B, J, C, e]. Each step makes a new one around the arrays that the caller keeps.

    It implements mlx-lm's cache protocol. Rows are padded on the left, so all of them write the same `slot`, and `offset` is each
    row's own position (its padding taken off), [B], for the rotary embedding. `mask` [B, 1, 1, C] allows the columns between a
    row's padding and the slot.
    """

    def __init__(self, keys: mx.array, values: mx.array, slot: mx.array, mask: mx.array, offset_B: mx.array) -> None:
        self.keys, self.values, self.slot, self.mask, self.offset = keys, values, slot, mask, offset_B

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write this step's column and return all C columns; those that are not written yet are masked."""
        # A slice update can be done in place (if nothing else holds the array, see `backend.generation.scheduler`); `where`
        # over the whole cache would copy it at every step. `slot` is an array: as an integer it would be a constant of the
        # trace, and every step a new trace.
        self.keys = mx.slice_update(self.keys, keys, self.slot, axes=(2,))
        self.values = mx.slice_update(self.values, values, self.slot, axes=(2,))
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """The step's mask; the arguments are mlx-lm's protocol and change nothing for one query a row."""
        return self.mask
