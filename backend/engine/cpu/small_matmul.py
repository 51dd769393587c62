"""x Wᵀ for the few rows of a decoding step on x86, where OpenBLAS would first copy all of W.

OpenBLAS packs both factors into its own layout before it multiplies. For a handful of rows that copy is most of the work; it is
skipped only for small products. So W, [out, in], is taken as a batch of slices (a view, nothing is copied), each of which makes
a product small enough.
"""

from __future__ import annotations

import mlx.core as mx

from backend.engine.device import on_x86

UNPACKED_FLOPS, UNPACKED_SIZE = 10**6, 1024
"""The largest product that OpenBLAS multiplies without packing: rows · columns · inner, and rows · columns of the result."""

MIN_WIDTH, MAX_WIDTH = 32, 512
"""Columns of a slice: with fewer, calls cost more than packing; with more, nothing is gained."""

MAX_ROWS = 16
"""With more rows packing costs little; and training, whose gradient would be a sum over slices, has more."""


def matmul_transposed(x: mx.array, weight: mx.array) -> mx.array:
    """[…, in] times the transpose of [out, in]: […, out]. In slices for few float32 rows on x86, else the plain product."""
    *before, inner = x.shape
    rows, outer = x.size // inner, weight.shape[0]
    width = slice_width(rows, inner, outer) if x.dtype == weight.dtype == mx.float32 and on_x86() else 0
    if not width:
        return x @ weight.T
    # Transposed views: BLAS takes the transposition as a flag, so W is read where it is.
    slices = weight.reshape(outer // width, width, inner).swapaxes(1, 2)
    return (x.reshape(1, rows, inner) @ slices).swapaxes(0, 1).reshape(*before, outer)


def slice_width(rows: int, inner: int, outer: int) -> int:
    """Rows of W in a slice, the most that make an unpacked product; 0 where none do, or all of W does."""
    width = MAX_WIDTH if rows <= MAX_ROWS else 0
    while width >= MIN_WIDTH and (
        rows * width > UNPACKED_SIZE or rows * width * inner > UNPACKED_FLOPS or outer % width
    ):
        width //= 2
    return width if MIN_WIDTH <= width < outer else 0
