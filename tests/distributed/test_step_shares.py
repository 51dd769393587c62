"""What a step's reports become: how long each rank waited, and the speeds by which the next rows are split."""

from __future__ import annotations

import pytest

from backend.distributed.step_shares import LearningReport, SampledRound, StepShares
from backend.types import Completion, Group, Problem


def sampled(rank: int, tokens: int, sampling_s: float, scoring_s: float) -> SampledRound:
    group = Group(Problem(0, "", [], [1], ""), [Completion([1] * tokens, [0.0] * tokens, "", "eos")])
    return SampledRound(rank, 0, [group], sampling_s, scoring_s)


def a_step(shares: StepShares, learned: tuple[int, int] = (300, 100)) -> dict[str, float]:
    """10 s of sampling, in which rank 0 is busy for 9 and rank 1 for 6; 5 s of learning, with 1 s and 2 s of waiting and 1 s of summing."""
    shares.add_sampling([sampled(0, 40, 4.0, 1.0), sampled(1, 30, 5.0, 1.0), sampled(0, 40, 4.0, 0.0)], 10.0, 3.0)
    shares.add_learning(1, LearningReport(learned[1], 5.0, 2.0, 1.0, 2.0))
    shares.add_learning(0, LearningReport(learned[0], 5.0, 1.0, 1.0, 1.0))
    return shares.metrics()


def test_the_wait_of_each_rank_is_what_it_was_not_busy() -> None:
    metrics = a_step(StepShares(2))
    assert metrics == pytest.approx({
        "waiting_share": (2 + 6) / 2 / 15, "time/gradient_sum": 1.0,
        "ranks/0/prompts": 2, "ranks/0/tokens_per_second": 10.0, "ranks/0/learn_tokens_per_second": 100.0, "ranks/0/waiting": 2.0,
        "ranks/0/memory": 3.0,
        "ranks/1/prompts": 1, "ranks/1/tokens_per_second": 6.0, "ranks/1/learn_tokens_per_second": 50.0, "ranks/1/waiting": 6.0,
        "ranks/1/memory": 2.0,
    })  # fmt: skip


def test_rows_are_split_by_the_speeds_of_learning_once_they_are_known() -> None:
    shares = StepShares(2)
    assert shares.speeds([1.0, 2.0]) == [1.0, 2.0], "before the first update those of sampling"
    a_step(shares)
    assert shares.speeds([1.0, 2.0]) == [100.0, 50.0]
    a_step(shares, (600, 100))
    assert shares.speeds([1.0, 2.0]) == [150.0, 50.0]
    a_step(shares, (600, 0))
    assert shares.speeds([1.0, 2.0]) == pytest.approx([175.0, 55.0]), "a rank without rows may have become faster"
    shares = StepShares(2)
    a_step(shares, (600, 0))
    assert shares.speeds([1.0, 2.0]) == [1.0, 2.0]
