"""Means over the tokens of a few completions, and how far they are to be trusted."""

from __future__ import annotations

import random
import statistics

import mlx.core as mx
import pytest

from backend.training.batch import pack
from backend.training.grpo import RowSums, means, row_sums
from backend.training.losses import TRL_DEFAULTS
from backend.types import Completion, Group, Problem


def row(total: float, count: float) -> RowSums:
    return {"entropy": (total, count)}


def test_the_mean_is_over_tokens_and_its_error_over_completions() -> None:
    """Sums 2, 9 and 4 over 2, 3 and 4 tokens: the mean is 15 / 9; what is left of each is −4/3, 4 and −8/3."""
    found = means([row(2, 2), row(9, 3), row(4, 4)])
    assert found["entropy"] == pytest.approx(15 / 9)
    assert found["entropy_stderr"] == pytest.approx((3 / 2 * ((4 / 3) ** 2 + 16 + (8 / 3) ** 2)) ** 0.5 / 9)
    assert means([row(2, 2)]) == {"entropy": 1.0} and means([]) == means([row(0, 0)]) == {}


def test_the_standard_error_is_how_far_means_of_other_samples_lie() -> None:
    rng = random.Random(3)

    def sample() -> dict[str, float]:
        counts = [rng.randint(5, 40) for _ in range(8)]
        return means([row(rng.gauss(1.0 + count / 40, 0.3) * count, count) for count in counts])

    drawn = [sample() for _ in range(2_000)]
    spread = statistics.stdev(found["entropy"] for found in drawn)
    assert statistics.mean(found["entropy_stderr"] for found in drawn) == pytest.approx(spread, rel=0.1)


def test_each_row_has_the_sums_of_its_own_tokens() -> None:
    problem = Problem(0, "", [], [1], "")
    batch = pack(
        [Group(problem, [Completion([5, 6, 7][:count], [0.0] * count, "", "eos") for count in (3, 1)])], pad_id=0
    )
    logp_BT, entropy_BT = (
        mx.array([[-1.0, -2.0, -3.0], [-4.0, 9.0, 9.0]]),
        mx.array([[0.5, 0.25, 0.25], [2.0, 9.0, 9.0]]),
    )
    long, short = row_sums(batch, logp_BT, entropy_BT, logp_BT, TRL_DEFAULTS)
    assert (long, short) == ({"entropy": (1.0, 3.0), "kl": (0.0, 3.0)}, {"entropy": (2.0, 1.0), "kl": (0.0, 1.0)})
    assert "kl" not in row_sums(batch, logp_BT, entropy_BT, None, TRL_DEFAULTS)[0]
