"""What the ranks of a run tell one another while they learn. A rank is a process with its own copy of the model and a share of the rows.

Every rank makes the same calls in the same order; each call returns once all of them have made it. A run of one process has `ALONE`, which
returns what it is given: nothing is copied, evaluated or waited for. How values travel is `backend.distributed.collectives`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx


class Collectives(Protocol):
    """`rank` counts from 0, the leader, to `size` − 1."""

    rank: int
    size: int

    def sum(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The sums over the ranks, in float32, of arrays that have the same shapes everywhere; the same bits on every rank."""
        ...

    def broadcast(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Rank 0's arrays, bit for bit; the others pass arrays of the same shapes and types."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Plain JSON, with NaN and infinities; a float comes out as the same double."""
        ...

    def concatenate(self, x_N: mx.array) -> mx.array:
        """Every rank's vector one behind the other, by rank, in float32; their lengths may differ, and may be 0."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...


class Alone(Collectives):
    """One process: every total is its own."""

    rank = 0
    size = 1

    def sum(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        return list(arrays)

    def broadcast(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        return list(arrays)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def concatenate(self, x_N: mx.array) -> mx.array:
        return x_N

    def barrier(self) -> None: ...


ALONE = Alone()
