"""Arrays that several module trees share, also where decoding has packed them: a second policy on the same base must
find the packed result instead of making another."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


class SharedWeights:
    """The tree from which policies are copied, and the packed arrays whose views it holds."""

    def __init__(self, tree: nn.Module) -> None:
        self.tree = tree
        # By the identity of the views; they are kept, so that no other array takes one of these numbers.
        self._packed: dict[tuple[int, ...], tuple[list[mx.array], mx.array]] = {}

    def packed(self, views: Sequence[mx.array]) -> mx.array | None:
        """The array that these views, in this order, are all of; None if they were not packed."""
        found = self._packed.get(tuple(map(id, views)))
        return found[1] if found else None

    def add(self, views: Sequence[mx.array], packed: mx.array) -> None:
        self._packed[tuple(map(id, views))] = list(views), packed


def copy_sharing_arrays(model: nn.Module) -> nn.Module:
    """A second module tree over the same arrays and groups."""
    shared: list[Any] = [array for _, array in tree_flatten(model.parameters())]
    shared += [x for part in model.modules() for x in vars(part).values() if isinstance(x, mx.distributed.Group)]
    return copy.deepcopy(model, {id(x): x for x in shared})  # deepcopy does not copy objects that are in its memo
