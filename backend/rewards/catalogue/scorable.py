"""Which reward functions of a run can score an answer to a prompt whose expected answer may not be known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backend.rewards.catalogue.catalog import COMPARING_REWARDS, metric_name, reward_call
from backend.utils.errors import UserError


class Scorable(NamedTuple):
    """Entries of `reward_functions` with their weights, and the names of those that are left out."""

    names: list[str]
    weights: list[float]
    left_out: list[str]


def scorable(names: Sequence[str], weights: Sequence[float], *, has_answer: bool) -> Scorable:
    """Without an expected answer, leave out the shipped functions that compare with one: they would give every answer 0.
    No `weights` means 1 for each."""
    weighted = list(zip(names, weights or [1.0] * len(names), strict=True))
    compares = {name: not has_answer and _compares(name) for name in names}
    kept = [(name, weight) for name, weight in weighted if not compares[name]]
    left_out = [metric_name(name) for name in names if compares[name]]
    return Scorable([name for name, _ in kept], [weight for _, weight in kept], left_out)


def _compares(entry: str) -> bool:
    """Whether an entry, under whatever name of its own, is a shipped function that compares with the answer."""
    try:
        return reward_call(entry, COMPARING_REWARDS).function in COMPARING_REWARDS
    except UserError:
        return False
