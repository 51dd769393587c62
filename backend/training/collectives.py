"""Communication of the ranks of a run while they learn. A rank is a process with its own copy of the model and a share
of the rows.

Every rank makes the same calls in the same order; each call returns once all of them have made it. A run of one
process has `ALONE`, which returns its arguments: nothing is copied, evaluated or waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from backend.training.losses import Tally, combine


class Collectives(Protocol):
    """`rank` counts from 0, the leader, to `size` − 1."""

    rank: int
    size: int

    def sum(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The sums over the ranks, in float32, of arrays that have the same shapes everywhere; the same bits on
        every rank."""
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


def total_gradient(ranks: Collectives, gradient: Any) -> Any:
    """The tree of gradients summed over the ranks, as one flat vector."""
    if ranks.size == 1:
        return gradient
    named: list[tuple[str, mx.array]] = tree_flatten(gradient)  # pyright: ignore[reportAssignmentType]: of arrays alone
    sums = ranks.sum([x for _, x in named])
    return tree_unflatten([(name, x) for (name, _), x in zip(named, sums, strict=True)])


def total_loss(ranks: Collectives, loss: mx.array, tallies: Sequence[Tally]) -> tuple[mx.array, Sequence[Tally]]:
    """The loss of the whole optimizer batch, and its tallies: one of each rank that had rows, in the order of ranks."""
    if ranks.size == 1:
        return loss, tallies
    own = _numbers(combine(tallies)) if tallies else None
    gathered = ranks.gather({"loss": loss.item(), "tally": own})
    of_ranks = [_arrays(each["tally"]) for each in gathered if each["tally"] is not None]
    return mx.array(sum(each["loss"] for each in gathered)), of_ranks


def total(ranks: Collectives, x: mx.array) -> mx.array:
    """A scalar summed over the ranks."""
    return ranks.sum([x])[0]


def merged(ranks: Collectives, own: dict[int, Any]) -> dict[int, Any]:
    """The entries of all ranks, of which each has other rows. JSON turns numbers that are keys into texts; here they
    stay numbers."""
    if ranks.size == 1:
        return own
    return {row: value for pairs in ranks.gather([*own.items()]) for row, value in pairs}


def _numbers(tally: Tally) -> Any:
    return tree_map(lambda x: x.tolist(), tally)


def _arrays(numbers: dict[str, dict[str, Any]]) -> Tally:
    # A float32 is a double exactly, so it survives JSON.
    return {kind: {name: mx.array(x, mx.float32) for name, x in of_kind.items()} for kind, of_kind in numbers.items()}
