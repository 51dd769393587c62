"""What every step logs of a judge's or reward model's scores, for the health rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from backend.types import Group

Block = tuple[Sequence[float], Sequence[float]]  # x and y of the same observations


def score_metrics(name: str, groups: Sequence[Group], scores: Sequence[float | None]) -> dict[str, float]:
    """`saturated`: the larger of the shares of scores that are 0 and that are 1, where all lie between, as a judge's
    do. `length_correlation`: of scores and tokens within groups, where both vary."""
    rest, blocks = iter(scores), list[Block]()
    for group in groups:
        scored = [(len(each.tokens), score) for each, score in zip(group.completions, rest, strict=False)]
        known = [(length, score) for length, score in scored if score is not None]
        blocks.append(([length for length, _ in known], [score for _, score in known]))
    given = [score for _, block in blocks for score in block]
    metrics: dict[str, float] = {}
    if given and min(given) >= 0 and max(given) <= 1:
        metrics[f"judge/{name}/saturated"] = max(given.count(0), given.count(1)) / len(given)
    if (value := correlation(blocks)) is not None:
        metrics[f"judge/{name}/length_correlation"] = value
    return metrics


def sums(block: Block) -> tuple[float, float, float]:
    """Σxy, Σx² and Σy² about the means."""
    x, y = ([value - fmean(values) for value in values] for values in block)
    return sum(map(math.prod, zip(x, y, strict=True))), sum(a * a for a in x), sum(b * b for b in y)


def correlation(blocks: Sequence[Block]) -> float | None:
    """Pearson's, within blocks; None where x or y does not vary."""
    of_blocks = [sums(block) for block in blocks if block[0]]
    xy, xx, yy = (sum(each[k] for each in of_blocks) for k in range(3))
    return xy / math.sqrt(xx * yy) if xx * yy else None
