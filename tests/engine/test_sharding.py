"""How arrays are dealt out to ranks: parts, and parts put back, against mlx's own layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.nn.layers.distributed import shard_linear

from backend.engine.sharding import COLUMNS, ROWS, Division, LayerShare
from backend.models.sharded_policy import AbsentGroup


class RankOf(AbsentGroup):
    """Any rank of a group, without the others."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(size)
        self._rank = rank

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("segments", [1, 3, [8, 16], [1 / 3, 2 / 3]])
@pytest.mark.parametrize("kind", [COLUMNS, ROWS])
def test_a_part_is_what_mlx_gives_the_rank(kind: str, segments: Any) -> None:
    linear = nn.Linear(24, 24, bias=False)
    share = LayerShare(kind, segments if isinstance(segments, int) else tuple(segments))
    division = share.division(linear.weight)
    parts = []
    for rank in range(2):
        group: Any = RankOf(rank, 2)
        own = shard_linear(linear, kind, segments=segments, group=group).weight
        np.testing.assert_array_equal(np.array(own), np.array(division.part(linear.weight, rank, 2)))
        parts.append(division.placed(own, rank, 2))
    np.testing.assert_array_equal(np.array(parts[0] + parts[1]), np.array(linear.weight))


def test_what_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="split"):
        Division(0, 3).part(mx.zeros((9, 2)), 0, 2)
