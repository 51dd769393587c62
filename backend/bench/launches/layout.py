"""Where the elements of an array lie in its buffer, as far as mlx's Metal backend asks before it launches a kernel.

Views (transposing, slicing, broadcasting) change strides only; a kernel that needs another layout copies its input first, in a
launch of its own. Strides count elements. Sources: mlx/backend/common/{utils,slicing}.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Shape, strides and the number of elements that lie between an array's first and last one in its buffer."""

    shape: Shape
    strides: Shape
    data_size: int
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_row_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps. Axes of length 1 have no say."""
        wanted = row_major(self.shape)
        return all(n == 1 or s == w for n, s, w in zip(self.shape, self.strides, wanted, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether they fill a piece of the buffer without gaps, in any order of the axes."""
        return self.data_size == self.size


def row_major(shape: Shape) -> Shape:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def fresh(shape: Shape, dtype: str) -> Layout:
    """The layout of an array that a kernel has just written."""
    return Layout(shape, row_major(shape), math.prod(shape), dtype)


def transposed(layout: Layout, axes: Sequence[int]) -> Layout:
    shape, strides = (tuple(values[axis] for axis in axes) for values in (layout.shape, layout.strides))
    return Layout(shape, strides, layout.data_size, layout.dtype)


def broadcast(layout: Layout, shape: Shape) -> Layout:
    """Repeated axes have stride 0."""
    missing = len(shape) - len(layout.shape)
    strides = [0] * missing + [
        s if n == wanted else 0 for n, s, wanted in zip(layout.shape, layout.strides, shape[missing:], strict=True)
    ]
    return Layout(shape, tuple(strides), layout.data_size, layout.dtype)


def sliced(layout: Layout, shape: Shape, steps: Sequence[int]) -> Layout:
    strides = tuple(stride * step for stride, step in zip(layout.strides, steps, strict=True))
    spanned = 1 + sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))
    return Layout(shape, strides, spanned, layout.dtype)


def strided(layout: Layout, shape: Shape, strides: Shape) -> Layout:
    """`mx.as_strided`, of which mlx calls contiguous only what is in row-major order (mlx/backend/common/common.cpp)."""
    out = Layout(shape, strides, math.prod(shape), layout.dtype)
    return out if out.is_row_contiguous else Layout(shape, strides, 0, layout.dtype)


def reshaped(layout: Layout, shape: Shape) -> Layout | None:
    """The same elements in another shape; None where that is no view, so that mlx copies them."""
    if layout.is_row_contiguous:
        return Layout(shape, row_major(shape), layout.data_size, layout.dtype)
    strides, old = [], _merged_axes(layout)
    for n in reversed(shape):
        if n == 1:
            strides.append(1)
            continue
        if not old or old[-1][0] % n:
            return None
        length, stride = old.pop()
        strides.append(stride)
        if length != n:
            old.append((length // n, stride * n))
    return Layout(shape, tuple(reversed(strides)), layout.data_size, layout.dtype)


def _merged_axes(layout: Layout) -> list[tuple[int, int]]:
    """(length, stride) of the axes, neighbours that lie behind each other as one (mlx: `collapse_contiguous_dims`)."""
    merged: list[tuple[int, int]] = []
    for n, stride in zip(layout.shape, layout.strides, strict=True):
        if n == 1:
            continue
        if merged and merged[-1][1] == n * stride:
            merged[-1] = (merged[-1][0] * n, stride)
        else:
            merged.append((n, stride))
    return merged
