"""x Wᵀ for the few rows of a decoding step, where a BLAS would first copy all of W.

OpenBLAS on x86 lays both factors out anew before it multiplies. For a handful of rows that is most of the work, and it spares
itself that for small products only; so W is taken a slice at a time, as a view.
"""

from __future__ import annotations

import mlx.core as mx

from backend.engine.cpu.vector_exp import on_x86

SMALL, SMALL_SLICE = 10**6, 1024
"""Multiplications of a product that OpenBLAS makes without laying out its factors, and numbers it may give."""

FEWEST, MOST = 32, 512
"""Columns of a slice worth a call, and worth having."""

MOST_ROWS = 16
"""With more, what is spared is little; and learning, whose gradient would be a sum over slices, has more."""


def times_transposed(x: mx.array, weight: mx.array) -> mx.array:
    """[…, in] times the transpose of [out, in]: […, out]."""
    *before, inner = x.shape
    rows, outer = x.size // inner, weight.shape[0]
    width = slice_width(rows, inner, outer) if x.dtype == weight.dtype == mx.float32 and on_x86() else 0
    if not width:
        return x @ weight.T
    slices = weight.reshape(outer // width, width, inner).swapaxes(1, 2)
    return (x.reshape(1, rows, inner) @ slices).swapaxes(0, 1).reshape(*before, outer)


def slice_width(rows: int, inner: int, outer: int) -> int:
    """Columns of W that make a small product; 0 where none do, or W is one by itself."""
    width = MOST if rows <= MOST_ROWS else 0
    while width >= FEWEST and (rows * width > SMALL_SLICE or rows * width * inner > SMALL or outer % width):
        width //= 2
    return width if FEWEST <= width < outer else 0
