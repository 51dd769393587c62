"""The inverse CDF of `backend.generation.sampler` for a GPU, where a step of few rows is bound by its number of kernels: nine of them.

The same two levels, the sums of blocks of tokens and then the tokens of one block, with the choice turned round: the first index at
which the running sum reaches a target is the last one with mass whose sum *before* it is below the target. So a maximum finds it, and
one maximum finds the sum before it, too, for that rises from index to index. Nothing is gathered for it, and no index is computed from
two others in a kernel of its own.

What mlx.compile fuses decides the rest. Every array [B, 1] of arithmetic would be a kernel if two others read it, so scalars of a row
are views of a running sum, and are widened before they are computed with (`Sums.total`).
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np


class Sums(NamedTuple):
    """Masses, and the sum of those before each, over the last axis."""

    mass: mx.array
    before: mx.array

    @classmethod
    def of(cls, mass: mx.array) -> Sums:
        return cls(mass, mx.cumsum(mass, axis=-1, inclusive=False))

    def part(self, m: int) -> Sums:
        """Item m of the first axis."""
        return Sums(part(self.mass, m), part(self.before, m))

    def total(self, shape: tuple[int, ...]) -> mx.array:
        """The sum of all, in a shape that [..., 1] is broadcast to."""
        return mx.broadcast_to(self.before[..., -1:], shape) + mx.broadcast_to(self.mass[..., -1:], shape)

    def can_be_last(self, target: mx.array) -> mx.array:
        """Where a mass lies whose sum before is below the target: the last of them reaches it. In a row with mass there is one.

        Only indices with mass count: a GPU sums in blocks, so its running sum may fall by a rounding where the mass is 0, and a
        filtered token must never be sampled. The first mass, before which the sum is 0, takes a target of 0 and what rounding makes
        negative; a target that rounding puts above the total is the last one's.
        """
        return (self.mass > 0) & ((self.before < target) | (self.before <= 0))


def inverse_cdf(masses_MBV: mx.array, uniform_B1: mx.array, width: int) -> tuple[mx.array, Sums]:
    """The first token [B, 1] at which the running sum of the last item's masses reaches `uniform` times their sum; and the sums
    [M, B, V / width] of blocks of `width` tokens, a divisor of V, of all M items."""
    M, B, V = masses_MBV.shape
    blocks_MBNW = masses_MBV.reshape(M, B, V // width, width)
    sums = Sums.of(blocks_MBNW.sum(axis=-1))
    kept = sums.part(M - 1)
    block_B1, before_B1 = _reaching_block(kept, uniform_B1)
    inside = Sums.of(mx.take_along_axis(part(blocks_MBNW, M - 1), block_B1[:, None], axis=1)[:, 0])
    target_BW = mx.broadcast_to(uniform_B1, (B, width)) * kept.total((B, width)) - before_B1
    token_BW = block_B1 * width + _indices(width)
    return mx.where(inside.can_be_last(target_BW), token_BW, 0).max(axis=-1, keepdims=True), sums


def _reaching_block(sums: Sums, uniform_B1: mx.array) -> tuple[mx.array, mx.array]:
    """[B, 1]: the first block whose running sum reaches `uniform` times the total, and the sum before it."""
    shape = sums.mass.shape
    is_last_BN = sums.can_be_last(mx.broadcast_to(uniform_B1, shape) * sums.total(shape))
    # One maximum for both: floats that are not negative order like their bits, so both are integers.
    is_index = mx.array([True, False]).reshape(2, 1, 1)
    both_2BN = mx.where(is_index, _indices(shape[-1]), sums.before.view(mx.uint32))
    best_2B1 = mx.where(is_last_BN, both_2BN, 0).max(axis=-1, keepdims=True)
    return part(best_2B1, 0), part(best_2B1, 1).view(mx.float32)


def _indices(count: int) -> mx.array:
    """0 … count − 1, a constant of the trace: `mx.arange` would be a kernel."""
    return mx.array(np.arange(count, dtype=np.uint32))


def part(array: mx.array, m: int) -> mx.array:
    """array[m] as a view, where mlx would gather."""
    return array[m : m + 1].squeeze(0)
