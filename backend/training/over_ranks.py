"""Totals of an update over all ranks: of its gradient, its loss and its tallies, and of what each rank knows of its own rows alone.

With one rank every function returns what it is given, at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from backend.training.additive_metrics import Tally, combine
from backend.training.collectives import Collectives


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
    """The entries of all ranks, of which each has other rows. JSON turns numbers that are keys into texts; here they stay numbers."""
    if ranks.size == 1:
        return own
    return {row: value for pairs in ranks.gather([*own.items()]) for row, value in pairs}


def _numbers(tally: Tally) -> Any:
    return tree_map(lambda x: x.tolist(), tally)


def _arrays(numbers: dict[str, dict[str, Any]]) -> Tally:
    # A float32 is a double exactly, so it survives JSON.
    return {kind: {name: mx.array(x, mx.float32) for name, x in of_kind.items()} for kind, of_kind in numbers.items()}
