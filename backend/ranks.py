"""Who am I among the processes of this run, and what do all of them together say.

A run on one machine never opens a group: `mlx.launch` and `mpirun` tell a process that it is one of several by its
environment, and without that every function here is an identity. Nothing is scheduled, split or sent from here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

LAUNCHED = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")
"""Variables that a launcher sets in every process it starts."""


@cache
def group() -> mx.distributed.Group | None:
    """The processes of this run; None when there is only this one. Opened at the first question."""
    if not any(name in os.environ for name in LAUNCHED):
        return None
    # strict: a launched process that cannot reach the others must not train on alone as if it were all of them.
    found = mx.distributed.init(strict=True)
    return found if found.size() > 1 else None


def rank() -> int:
    """This process's number, from 0; rank 0 writes the diary."""
    mine = group()
    return 0 if mine is None else mine.rank()


def size() -> int:
    """How many processes train together."""
    mine = group()
    return 1 if mine is None else mine.size()


def total(tree: Any) -> Any:
    """The sum over all ranks of every array in the tree."""
    return _over_all(mx.distributed.all_sum, tree)


def lowest(tree: Any) -> Any:
    """The least over all ranks of every array in the tree."""
    return _over_all(mx.distributed.all_min, tree)


def highest(tree: Any) -> Any:
    """The greatest over all ranks of every array in the tree."""
    return _over_all(mx.distributed.all_max, tree)


def agree(flag: bool) -> bool:
    """Whether any rank says so; then every rank gets True. Waits for all of them, so every rank must ask."""
    return flag if group() is None else bool(highest(mx.array(int(flag))).item())


def _over_all(collect: Callable[..., mx.array], tree: Any) -> Any:
    mine = group()
    return tree if mine is None else tree_map(lambda x: collect(x, group=mine), tree)
