"""What the last update of a step saw of each token, kept for completions.jsonl where a run records tokens.

An observer: it is given arrays that the update has evaluated already, and nothing here enters a graph, so recording changes no
weight. Arrays end in their axes: B rows, T tokens of the completion.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import mlx.core as mx

from backend.training.batch import Batch
from backend.training.collectives import Collectives, merged
from backend.training.losses import TokenValues


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One completion in the last update that it was part of; every list is as long as its tokens."""

    learned_logp: list[float]
    """log π_θ in nats at the sampling temperature, before that update; 0 where the mask is 0."""
    ratio: list[float]
    clipped: list[bool]
    advantage: list[float]
    """As `TokenValues.advantage_BT`."""


class TokenRecords:
    """Records by row of the step's batch, as `Batch.row_B` numbers them. A later update's replace an earlier one's."""

    def __init__(self) -> None:
        self._by_row: dict[int, TokenRecord] = {}
        self._own: dict[int, TokenRecord] = {}
        """Those kept since the last exchange."""

    def keep(self, batch: Batch, logp_BT: mx.array, values: TokenValues) -> None:
        """Keep the rows of one micro-batch."""
        columns: list[list[list[Any]]] = [
            x.tolist()  # pyright: ignore[reportAssignmentType]: two axes, so lists of lists
            for x in (logp_BT, values.ratio_BT, values.clipped_BT, values.advantage_BT)
        ]
        lengths: list[int] = batch.length_B.tolist()  # pyright: ignore[reportAssignmentType]: one axis, so a list
        for i, row in enumerate(batch.row_B.tolist()):  # pyright: ignore[reportArgumentType]: as above
            self._own[row] = TokenRecord(*(column[i][: lengths[i]] for column in columns))

    def exchange(self, ranks: Collectives) -> None:
        """After a step: take up the records of the other ranks, which have other rows."""
        if ranks.size > 1:
            of_all = merged(ranks, {row: astuple(record) for row, record in self._own.items()})
            self._own = {row: TokenRecord(*columns) for row, columns in of_all.items()}
        self._by_row |= self._own
        self._own = {}

    def take(self) -> dict[int, TokenRecord]:
        """The records since the last call, by row. A row without one was left out of every update: nothing of it could move
        the policy."""
        taken, self._by_row = self._by_row, {}
        return taken
