"""Proof: the interval of a paired difference covers the true one in at least 93 of 100 simulated evaluations, whatever the rewards
and from 30 prompts on."""

from __future__ import annotations

import math

import pytest

from tests.support.paired_rewards import CASES, covers

EVALUATIONS, RESAMPLES = 1500, 1000
NOISE = 2 * math.sqrt(0.93 * 0.07 / EVALUATIONS)
"""Two standard errors of a share of 0.93 among so many simulated evaluations: 0.013."""


@pytest.mark.proof
@pytest.mark.parametrize("prompts", [30, 60, 120, 250, 500])
@pytest.mark.parametrize("case", CASES)
def test_the_interval_covers(case: str, prompts: int) -> None:
    assert covers(CASES[case], prompts, EVALUATIONS, RESAMPLES, seed=11) >= 0.93 - NOISE
