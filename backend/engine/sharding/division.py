"""How an array is dealt out to the ranks of a group, as mlx's sharded layers deal out their weights.

The array is divided along one axis, at once or by segments: a layer that computes queries, keys and values in one product has three of
them, and each rank has its part of all three. Letters: N ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

Segments = int | tuple[int, ...] | tuple[float, ...]
"""mlx's `segments`: a number of equal ones, or the edges between them, as indices or as shares of the axis."""


@dataclass(frozen=True, slots=True)
class Division:
    """The `axis` that is dealt out, counted from the front, and its segments."""

    axis: int
    segments: Segments = 1

    def along(self, axis: int) -> Division:
        """The same segments along another axis, of an array that belongs to the same outputs or inputs."""
        return replace(self, axis=axis)

    def part(self, whole: mx.array, rank: int, size: int) -> mx.array:
        """What `rank` of `size` has of an array. Raises ValueError where a segment cannot be divided evenly."""
        segments = mx.split(whole, self._edges(whole.shape[self.axis]), axis=self.axis)
        return mx.contiguous(
            mx.concatenate([mx.split(x, size, axis=self.axis)[rank] for x in segments], axis=self.axis)
        )

    def placed(self, part: mx.array, rank: int, size: int) -> mx.array:
        """An array of the whole one's shape, zero but for this rank's part: those of all ranks add up to the whole."""
        length = part.shape[self.axis]
        edges = [edge // size for edge in self._edges(length * size)]
        segments: list[mx.array] = []
        for x in mx.split(part, edges, axis=self.axis):
            width = [(0, 0)] * x.ndim
            width[self.axis] = (rank * x.shape[self.axis], (size - 1 - rank) * x.shape[self.axis])
            segments.append(mx.pad(x, width))
        return mx.concatenate(segments, axis=self.axis)

    def _edges(self, length: int) -> list[int]:
        """Where the segments of an axis of this length meet."""
        if isinstance(self.segments, int):
            return list(itertools.accumulate([length // self.segments] * (self.segments - 1)))
        return [int(edge * length) if isinstance(edge, float) else edge for edge in self.segments]


def segments_of(given: int | Sequence[int] | Sequence[float]) -> Segments:
    """mlx's argument as a value of `Segments`."""
    return given if isinstance(given, int) else tuple(given)  # pyright: ignore[reportReturnType]: of one kind
