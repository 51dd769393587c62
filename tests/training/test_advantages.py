"""Advantages: TRL's numbers, numbers computed by hand, and invariances."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.training.advantages import advantages
from tests.support.cases import cases

CASES = json.loads((Path(__file__).parents[1] / "golden" / "advantages.json").read_text())
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


@cases("case", CASES)
def test_advantages_and_metrics_equal_trls(case: dict[str, Any]) -> None:
    actual, metrics = advantages(
        case["rewards"],
        case["G"],
        weights=case.get("reward_weights"),
        scale_rewards=case["scale_rewards"],
        multi_objective_aggregation=case["multi_objective_aggregation"],
        names=case["names"],
    )
    np.testing.assert_allclose(np.array(actual), case["out"]["advantages"], **CLOSE)
    expected = {name: float(value) for name, value in case["out"]["metrics"].items()}
    assert set(metrics) - {"reward_std_within_groups", "frac_groups_without_signal"} == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, err_msg=name, **CLOSE)


def test_the_std_within_groups_is_the_mean_of_the_groups_own() -> None:
    """Groups (0, 0) and (4, 6): stds 0 and √2; over all four √9. It falls to 0 where every group is of one mind, and
    the std over the step does not."""
    rewards = [[0.0], [0.0], [4.0], [6.0]]
    for scale in ("group", "batch", "none"):
        metrics = advantages(rewards, 2, scale_rewards=scale)[1]
        assert metrics["reward_std_within_groups"] == pytest.approx(2**0.5 / 2)
        assert metrics["reward_std"] == pytest.approx(3.0)
    alike = advantages([[0.0], [0.0], [4.0], [4.0]], 2)[1]
    assert alike["reward_std_within_groups"] == 0 and alike["reward_std"] > 2
    assert "reward_std_within_groups" not in advantages([[1.0], [2.0]], 1)[1]


def test_leave_one_out_compares_with_the_other_scored_completions() -> None:
    # Rewards 1, 2, 0 and none: 1 − (2 + 0)/2, 2 − (1 + 0)/2, 0 − (1 + 2)/2. The one without a score is no fourth
    # completion. Of the second group one is scored, of the third two.
    rewards = [[1.0], [2.0], [0.0], [None], [5.0], [None], [None], [None], [None], [2.0], [5.0], [None]]
    values, _ = advantages(rewards, 4, scale_rewards="none", baseline="leave_one_out")
    assert values.tolist() == pytest.approx([0, 1.5, -1.5, 0, 0, 0, 0, 0, 0, -3, 3, 0])


def test_normalize_then_sum_computed_by_hand() -> None:
    # GDPO. Group (0, 2) and (0, 20): z is ∓1/√2 for both functions, so the big numbers of the second do not drown the
    # first; with weights 1 and 0.5, S = ∓1.5/√2, and once more over the batch.
    actual, metrics = advantages(
        [[0.0, 20.0], [2.0, 0.0]], 2, weights=[1, 0.5], multi_objective_aggregation="normalize_then_sum"
    )
    z, big = 1 / (math.sqrt(2) + 1e-4), 10 / (math.sqrt(200) + 1e-4)
    s = z - 0.5 * big
    assert actual.tolist() == pytest.approx([-s / (s * math.sqrt(2) + 1e-4), s / (s * math.sqrt(2) + 1e-4)])
    assert metrics["reward"] == pytest.approx((10 + 2) / 2)  # the charts keep showing rewards, not z-scores


def test_normalize_then_sum_skips_missing_scores_and_ignores_scale_rewards() -> None:
    rewards = [[1.0, None], [0.0, 3.0], [None, None], [0.5, 1.0]]
    actual = [
        advantages(rewards, 2, multi_objective_aggregation="normalize_then_sum", scale_rewards=scale)[0].tolist()
        for scale in ("group", "batch", "none")
    ]
    # A single score has no standard deviation: the second function contributes nothing in either group.
    z = 0.5 / (math.sqrt(0.5) + 1e-4)
    sums = [z, -z, 0]
    std = math.sqrt(sum((x - sum(sums) / 3) ** 2 for x in sums) / 2)
    assert actual[0] == pytest.approx([z / (std + 1e-4), -z / (std + 1e-4), 0, 0])
    assert actual[0] == actual[1] == actual[2]


def test_an_unscored_completion_counts_in_no_mean_and_gets_advantage_0() -> None:
    # As a 0 it would have pulled the mean down to 2/3 and got an advantage of its own.
    actual, metrics = advantages([[1.0], [None], [1.0]], 3, names=["acc"], scale_rewards="none")
    assert actual.tolist() == [0, 0, 0]
    assert metrics["reward"] == metrics["rewards/acc/mean"] == 1


scores = st.one_of(st.none(), st.floats(-5, 5, width=16))
batches = st.integers(1, 3).flatmap(
    lambda k: st.lists(st.lists(scores, min_size=k, max_size=k), min_size=4, max_size=4 * 4).map(
        lambda rows: rows[: len(rows) // 4 * 4]
    )
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rewards=batches, data=st.data(), scale=st.sampled_from(["group", "batch", "none"]))
def test_order_shift_and_centring_for_any_rewards(rewards: list[list[float | None]], data: st.DataObject, scale: str):
    actual = np.array(advantages(rewards, 4, scale_rewards=scale)[0])
    assert np.isfinite(actual).all()
    # Relative to the group: they sum to 0 over what was scored. (n − 1 and 1e-4 only scale them.)
    np.testing.assert_allclose(actual.reshape(-1, 4).sum(axis=1), 0, atol=1e-4)
    # A constant on every reward, and the order inside a group, do not matter.
    shifted = [[None if x is None else x + 8 for x in row] for row in rewards] if len(rewards[0]) == 1 else rewards
    np.testing.assert_allclose(np.array(advantages(shifted, 4, scale_rewards=scale)[0]), actual, atol=1e-4)
    order = data.draw(st.permutations(range(4)))
    shuffled = [rewards[i + j] for i in range(0, len(rewards), 4) for j in order]
    again = np.array(advantages(shuffled, 4, scale_rewards=scale)[0])
    np.testing.assert_allclose(again, actual.reshape(-1, 4)[:, order].reshape(-1), atol=1e-5)
