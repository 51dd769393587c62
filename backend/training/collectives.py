"""Communication between the ranks of a run, processes with a copy of the model and a share of the rows. All ranks make
the same calls in the same order; each blocks until all have made it."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from backend.training.losses import Tally, combine


class Collectives:
    """Those of a run with one process; several have a subclass. `rank` runs from 0, the leader, to `size` − 1."""

    rank, size = 0, 1

    def sum(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Sum arrays of equal shapes over the ranks in float32; bit-equal on every rank."""
        return list(arrays)

    def broadcast(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Rank 0's arrays; the others pass arrays of the same shapes and types."""
        return list(arrays)

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in rank order; floats are exact, NaN and infinities allowed."""
        return [value]

    def concatenate(self, x_N: mx.array) -> mx.array:
        """Concatenate float32 vectors in rank order; lengths may differ or be 0."""
        return x_N


ALONE = Collectives()


def total_gradient(ranks: Collectives, gradient: Any) -> Any:
    """Sum of the gradients over the ranks."""
    named: list[tuple[str, mx.array]] = tree_flatten(gradient)  # pyright: ignore[reportAssignmentType]: of arrays alone
    sums = ranks.sum([x for _, x in named])
    return tree_unflatten([(name, x) for (name, _), x in zip(named, sums, strict=True)])


def total_loss(ranks: Collectives, loss: mx.array, tallies: Sequence[Tally]) -> tuple[mx.array, Sequence[Tally]]:
    """Sum the loss over the ranks and collect the tallies of those that had rows."""
    if ranks.size == 1:
        return loss, tallies
    own = tree_map(lambda x: x.tolist(), combine(tallies)) if tallies else None
    gathered = ranks.gather({"loss": loss.item(), "tally": own})
    # A float32 is a double exactly, so it survives JSON.
    of_ranks: list[Tally] = [
        {kind: {name: mx.array(x, mx.float32) for name, x in named.items()} for kind, named in each["tally"].items()}
        for each in gathered
        if each["tally"] is not None
    ]
    return mx.array(sum(each["loss"] for each in gathered)), of_ranks


def merged(ranks: Collectives, own: dict[int, Any]) -> dict[int, Any]:
    """Merge the entries of all ranks; integer keys stay integers."""
    return {row: value for pairs in ranks.gather([*own.items()]) for row, value in pairs}
