"""What a step logs of a judge's scores."""

from __future__ import annotations

import pytest

from backend.judges.score_metrics import score_metrics
from backend.types import Completion, Group, Problem


def groups(*lengths: list[int]) -> list[Group]:
    problem = Problem(0, "p", [], [], "")
    return [Group(problem, [Completion([1] * length, [], "", "eos") for length in each]) for each in lengths]


def test_length_counts_within_groups_and_only_scores_at_one_end_saturate() -> None:
    """The second group is longer and scores lower: over both the correlation would be negative."""
    two = groups([1, 2, 3], [11, 12, 13])
    found = score_metrics("j", two, [0.7, 0.8, 0.9, 0.1, 0.2, 0.3])
    assert found == {"judge/j/saturated": 0.0, "judge/j/length_correlation": pytest.approx(1.0)}
    assert score_metrics("j", two, [1, 1, None, 0, 1, 0])["judge/j/saturated"] == 3 / 5
    assert score_metrics("j", two, [1.0] * 6) == {"judge/j/saturated": 1.0}
    assert score_metrics("j", two, [None] * 6) == {}
    assert set(score_metrics("rm", two, [-3.0, 8.0, 2.0, 1.0, 0.0, 1.0])) == {"judge/rm/length_correlation"}
