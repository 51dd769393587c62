"""Intervals over prompts, paired differences and pass@k against their definitions."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from backend.trainer.evaluation.comparison import Column, estimates, pass_at_k
from backend.trainer.evaluation.evaluation_rows import MeanWithInterval
from tests.support.paired_rewards import CASES, covers


def one(values: list[float | None], low: float, high: float) -> MeanWithInterval:
    return estimates([Column.of(values, low, high)])[0]


@pytest.mark.parametrize("completions", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(completions: int) -> None:
    for passed in range(completions + 1):
        passes = [index < passed for index in range(completions)]
        for k in range(1, completions + 1):
            subsets = [any(chosen) for chosen in combinations(passes, k)]
            assert pass_at_k(completions, passed, k) == pytest.approx(np.mean(subsets), abs=1e-12)


def test_the_mean_is_that_of_the_prompts_and_lies_within_its_interval() -> None:
    values: list[float | None] = [0.0, 1.0, 1.0, 0.0, 1.0] * 20
    mean = one(values, 0, 1)
    assert mean.value == pytest.approx(0.6)
    assert mean.low is not None and mean.high is not None
    # The normal interval, 0.6 ± 1.96 √(0.24 / 100), is about right for a hundred prompts.
    assert mean.low == pytest.approx(0.504, abs=0.02) and mean.high == pytest.approx(0.696, abs=0.02)
    ones = one([1.0] * 30, 0, 1)
    assert ones.high == ones.value == 1.0 and ones.low is not None and 0.85 < ones.low < 1


def test_a_difference_is_paired() -> None:
    """Prompts differ far more than the sides do: only a paired difference can tell."""
    rng = np.random.default_rng(3)
    base = rng.normal(0, 10, 200)
    tuned = base + rng.normal(0.5, 0.2, 200)
    low, high = float(min(base.min(), tuned.min())), float(max(base.max(), tuned.max()))
    before, after = Column(base, low, high), Column(tuned, low, high)
    change, mean_before, mean_after = estimates([Column.difference(after, before), before, after])
    assert change.value == pytest.approx(0.5, abs=0.05) and change.excludes_zero
    assert mean_before.high is not None and mean_after.low is not None and mean_before.high > mean_after.low


@pytest.mark.parametrize("case", ["pass 0.30 to 0.50", "one prompt in ten changes", "mostly zero"])
def test_the_interval_covers_the_true_difference(case: str) -> None:
    """A quick look, at the smallest size: the plain percentile interval covers 66 of 100 of the second case."""
    assert covers(CASES[case], prompts=30, cases=200, resamples=400, seed=5) >= 0.93
