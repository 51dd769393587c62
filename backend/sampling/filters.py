"""Exact thresholds of top-k and top-p without sorting the vocabulary.

Top-k: split a row into blocks; the k largest values lie in the k blocks with the largest maxima. A GPU leaves some
values outside of blocks where that lets it sort maxima and candidates in one launch each (mlx, backend/metal/sort.cpp).
Top-p (arXiv:1904.09751): the floor is the largest mass m for which the masses of at least m sum to `top_p` of all. A
CPU sorts few masses and adds many up in histograms by the bits of their floats, which order like numbers; a GPU sorts,
since its additions into histograms are atomic. Sums in float64 on a CPU: float32 was off by a token in most rows of
152,000.
"""

from functools import cache, partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from backend.engine.device import on_cpu, on_gpu

AT_ONCE = 2048  # values that are partitioned as they are: one launch on a GPU

MAX_WIDTH = 256  # of a block: Metal takes two passes for longer maxima

SORTED = 256  # masses in a row that a CPU sorts

MASS_BITS = 30  # of a float32 in [0, 1] that vary

FEW_BITS, MANY_BITS = 10, 15  # of a histogram's digit: three rounds over 1,024 bins, or two over 32,768

MANY_FROM = 1 << 16  # masses in a row from which MANY_BITS pays


def largest(values_BV: mx.array, k: int) -> mx.array:
    """[B, k]: each row's k largest values in rising order, 1 ≤ k ≤ V."""
    if on_gpu() and (cut := _uneven_cut(values_BV.shape[-1], k)):
        values_BV = _candidates(values_BV, k, cut)
    elif (width := _block_width(values_BV.shape[-1], k)) > 1:
        blocks_BWN = _blocks(values_BV, width)
        best_B1k = mx.argpartition(blocks_BWN.max(axis=1), -k, axis=-1)[:, None, -k:]
        values_BV = mx.take_along_axis(blocks_BWN, best_B1k, axis=-1).flatten(1)
    if on_cpu():  # first the k, which are then few to sort; a GPU's partition is a sort already
        values_BV = mx.topk(values_BV, k, axis=-1)
    return mx.sort(values_BV, axis=-1)[:, -k:]


def row_max(values_BV: mx.array) -> mx.array:
    """[B, 1]: each row's maximum, by block maxima where that is faster."""
    if (width := _block_width(values_BV.shape[-1], 1)) > 1:
        values_BV = _blocks(values_BV, width).max(axis=1)
    return values_BV.max(axis=-1, keepdims=True)


def row_sum(values_BV: mx.array) -> mx.array:
    """[B, 1]: each row's sum. On a CPU block sums first, in vectors."""
    if on_cpu() and (width := _block_width(values_BV.shape[-1], 1)) > 1:
        values_BV = _blocks(values_BV, width).sum(axis=1)
    return values_BV.sum(axis=-1, keepdims=True)


def per_row(value_B1: mx.array) -> mx.array:
    """A number for each row, to combine with [B, V]; on a CPU a scalar for one row, or kernels are not vectorised."""
    return value_B1.reshape(()) if on_cpu() and value_B1.size == 1 else value_B1


def masked(mass_BV: mx.array, is_kept_BV: mx.array) -> mx.array:
    """[B, V]: the masses, 0 where not kept. A product: an x86 CPU computes `where` in vectors for a single row only."""
    return mass_BV * (is_kept_BV.astype(mx.int32) if on_cpu() else is_kept_BV)


def _blocks(values_BV: mx.array, width: int) -> mx.array:
    return values_BV.reshape(values_BV.shape[0], width, -1)


@cache
def _block_width(V: int, k: int) -> int:
    if V <= AT_ONCE:
        return 1
    widths = range(2, min(MAX_WIDTH, V // (2 * k)) + 1)
    left = {width: V // width + k * width for width in widths if V % width == 0}
    width = min(left, key=left.__getitem__, default=1)
    return width if left.get(width, V) <= V // 2 else 1


class Cut(NamedTuple):
    """V = blocks · width + k · rest values: blocks, and the rest, shared out among the k best of them."""

    blocks: int
    width: int
    rest: int


@cache
def _uneven_cut(V: int, k: int) -> Cut | None:
    width = _block_width(V, k)
    if max(V // width, k * width) <= AT_ONCE:
        return None
    most = AT_ONCE // k
    cuts = [
        Cut((V - k * rest) // width, width, rest)
        for width in range(2, min(MAX_WIDTH, most) + 1)
        for rest in range(min(width, most - width + 1))
        if (V - k * rest) % width == 0
    ]
    cuts = [cut for cut in cuts if k <= cut.blocks <= AT_ONCE]
    return min(cuts, key=lambda cut: cut.blocks + k * (cut.width + cut.rest), default=None)


def _candidates(values_BV: mx.array, k: int, cut: Cut) -> mx.array:
    end = cut.blocks * cut.width
    maxima_BN = values_BV[:, :end].reshape(-1, cut.blocks, cut.width).max(axis=-1)
    best_Bk1 = mx.argpartition(maxima_BN, -k, axis=-1)[:, -k:, None]
    # Constants of a trace, so that one kernel computes the indices.
    stride_L = np.repeat([cut.width, 0], [cut.width, cut.rest])
    inside_kW, outside_kR = np.tile(np.arange(cut.width), (k, 1)), end + np.arange(k * cut.rest).reshape(k, -1)
    offset_kL = np.concatenate([inside_kW, outside_kR], axis=1)
    index_BkL = best_Bk1 * mx.array(stride_L.astype(np.uint32)) + mx.array(offset_kL.astype(np.uint32))
    return mx.take_along_axis(values_BV, index_BkL.flatten(1), axis=-1)


def nucleus_floor(mass_BV: mx.array, top_p: float) -> mx.array:
    """[B, 1]: the smallest mass inside the nucleus. Masses in [0, 1]; 0 < top_p < 1."""
    if on_cpu() and mass_BV.shape[-1] > SORTED:
        return _floor_by_histogram(mass_BV, top_p)
    rising_BV = mx.sort(mass_BV, axis=-1)
    return least_inside(rising_BV, rising_BV, top_p)


def least_inside(values_BK: mx.array, mass_BK: mx.array, top_p: float) -> mx.array:
    """[B, 1]: the value of the last token inside the nucleus; values and masses in rising order."""
    mass_BK = mass_BK.astype(mx.float64 if on_cpu() else mx.float32)
    from_BK = mx.cumsum(mass_BK, axis=-1, reverse=True)  # each mass and the larger ones
    inside_BK = from_BK - mass_BK < top_p * from_BK[:, :1]
    return mx.where(inside_BK, values_BK, mx.inf).min(axis=-1, keepdims=True)


def _floor_by_histogram(mass_BV: mx.array, top_p: float) -> mx.array:
    B, V = mass_BV.shape
    width = MANY_BITS if V >= MANY_FROM else FEW_BITS
    bits_BV = mass_BV.view(mx.int32)
    prefix_B1, above_B1, need_B1 = mx.zeros((B, 1), mx.int32), mx.zeros((B, 1), mx.float64), None
    for shift in range(MASS_BITS - width, -1, -width):
        counted_BV = mass_BV
        if need_B1 is not None:
            # Only masses with the digits found so far count; the others add 0, to any bin.
            counted_BV = masked(mass_BV, bits_BV >> (shift + width) == per_row(prefix_B1))
        # A scatter-add along an axis, in mlx only as a gather's gradient; `.at[…].add` takes eight times as long.
        digit_BV, empty_BN = (bits_BV >> shift) & ((1 << width) - 1), mx.zeros((B, 1 << width), mx.float64)
        gather = partial(mx.take_along_axis, indices=digit_BV, axis=-1)
        _, (sum_BN,) = mx.vjp(gather, [empty_BN], [counted_BV.astype(mx.float64)])
        # The mass in each bin and above falls from bin to bin, so the number of bins that reach `need` gives the last
        # of them. The first bin reaches it, but for rounding.
        beyond_BN = per_row(above_B1) + mx.cumsum(sum_BN, axis=-1, reverse=True, inclusive=False)
        from_BN = beyond_BN + sum_BN
        need_B1 = top_p * from_BN[:, :1] if need_B1 is None else need_B1
        digit_B1 = mx.maximum((from_BN >= per_row(need_B1)).sum(axis=-1, keepdims=True) - 1, 0).astype(mx.int32)
        above_B1 = mx.take_along_axis(beyond_BN, digit_B1, axis=-1)
        prefix_B1 = (prefix_B1 << width) | digit_B1
    return prefix_B1.view(mx.float32)
