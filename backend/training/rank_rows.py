"""Which rows of an optimizer batch each rank learns from: contiguous shares of the tokens, as large as the ranks are fast.

Every rank computes the same split from the same numbers, so nothing is exchanged. Token weights are fixed for the whole optimizer batch
before it (`losses.token_weights`), so no split changes a gradient beyond rounding. Plain lists; no arrays, no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from backend.training.microbatch import RowLengths

SNAP = 0.05
"""Share of all tokens by which a border moves so that it falls between two groups: rows of one prompt on two ranks make both read it."""


def rows_of_ranks(rows: Sequence[RowLengths], speeds: Sequence[float]) -> list[list[int]]:
    """The row indices of each rank, in proportion to `speeds` (tokens a second, or any unit), group after group. A rank may get none.

    Raises ValueError for speeds that are not all above 0.
    """
    if not speeds or min(speeds) <= 0:
        raise ValueError(f"the speeds of the ranks are above 0, not {list(speeds)}")
    ordered = sorted(rows, key=lambda row: (row.group, row.index))
    # before[i]: tokens ahead of row i. A prompt counts once for its group, with the first of its rows.
    costs = [
        row.length + (row.prompt if i == 0 or ordered[i - 1].group != row.group else 0) for i, row in enumerate(ordered)
    ]
    before = [0, *accumulate(costs)]
    between_groups = [
        i for i in range(len(ordered) + 1) if i in (0, len(ordered)) or ordered[i - 1].group != ordered[i].group
    ]
    total, goal, borders = before[-1], 0.0, [0]
    for speed in speeds[:-1]:
        goal += total * speed / sum(speeds)
        border = _nearest(range(len(ordered) + 1), before, goal)
        group_border = _nearest(between_groups, before, goal)
        if abs(before[group_border] - goal) <= SNAP * total:
            border = group_border
        borders.append(max(border, borders[-1]))
    borders.append(len(ordered))
    return [[row.index for row in ordered[start:end]] for start, end in pairwise(borders)]


def _nearest(places: Sequence[int], before: Sequence[int], goal: float) -> int:
    """The place with the least distance from `goal` tokens; of two, the first."""
    return min(places, key=lambda i: (abs(before[i] - goal), i))
