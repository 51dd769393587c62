"""The algorithm's bookkeeping without a model: what settings make of it, how micro-batches' metrics become a step's."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.config.config import Config, parse
from backend.engine.lm_head import TokenScores
from backend.training.advantages import advantages
from backend.training.batch import pack
from backend.training.collectives import ALONE
from backend.training.grpo import Grpo, RowSums, means, row_sums
from backend.training.losses import TRL_DEFAULTS
from backend.types import Completion, Group, Problem
from tests.support.cases import cases

FORWARD: Any = SimpleNamespace(ranks=ALONE)


def config_of(**settings: Any) -> Config:
    return parse({"model": "none", "data": "none", "beta": 0.0} | settings)


def algorithm_of(dtype: mx.Dtype = mx.float32, **settings: Any) -> Grpo:
    policy: Any = SimpleNamespace(split_model=SimpleNamespace(dtype=dtype), reference=None)
    return Grpo(policy, config_of(**settings))


def micro_batch(gaps: list[list[float]], *, mask: float = 1.0, kept: float = 0.0, held: float = 0.0) -> Any:
    """Rows whose policy lies `gaps` nats above what sampled, before filters and grammar took their shares."""
    rows = [
        Completion([5] * n, [-2.0] * n, "", "eos", log_kept=[kept] * n * bool(kept), log_held=[held] * n * bool(held))
        for n in map(len, gaps)
    ]
    batch = pack([Group(Problem(0, "", [], [1], ""), rows)], pad_id=0)
    widest = max(map(len, gaps))
    old_logp_BT = mx.array([[-2.0 + gap for gap in row] + [0.0] * (widest - len(row)) for row in gaps])
    return SimpleNamespace(batch=replace(batch, old_logp_BT=old_logp_BT, mask_BT=batch.mask_BT * mask))


def test_a_change_of_the_settings_reaches_the_algorithm() -> None:
    algorithm = algorithm_of(batch_size=3, group_size=4, entropy_coef=0.1)
    algorithm.bonus.value = 0.3
    config = config_of(batch_size=2, group_size=4, epsilon=0.125, entropy_coef=0.2)
    algorithm.change(config, {"batch_size"})
    assert (algorithm.config.batch_size, algorithm.loss.epsilon, algorithm.bonus.value) == (2, 0.125, 0.3)
    algorithm.change(config, {"entropy_coef"})
    assert algorithm.bonus.value == 0.2


GAPS = [[[0.5, 0.1, 0.3]], [[-0.2], [0.2, 0.4]]], [[[0.05, -0.6]]]
"""Of two optimizer batches of a rollout: the first in two micro-batches, of one and of two rows."""
RATIO, DIFFERENCE = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"


@pytest.mark.parametrize(
    ("settings", "measured"),
    [({}, [*GAPS[0], *GAPS[1]]), ({"ratio_against": "reference", "beta": 0.1}, GAPS[0])],
    ids=["every batch", "against the reference the first alone"],
)
def test_metrics_of_the_sampler_are_over_the_tokens_of_a_rollout_once(
    settings: dict[str, Any], measured: list[list[list[float]]]
) -> None:
    """Each batch is learnt from twice; completions without a token that is trained on count in no extreme."""
    algorithm = algorithm_of(steps_per_generation=2, num_iterations=2, **settings)
    batches = [[micro_batch(gaps) for gaps in parts] for parts in GAPS]
    batches[0].append(micro_batch([[9.0]], mask=0.0))
    metrics = algorithm.sampler_metrics(batches * 2, FORWARD)
    gaps = np.array([gap for part in measured for row in part for gap in row])
    ratios, differences = np.exp(gaps), np.abs(gaps)
    expected = {f"{RATIO}/{name}": getattr(ratios, name)() for name in ("min", "mean", "max")}
    for key in (DIFFERENCE, "sampling/logp_gap"):
        expected |= {f"{key}/mean": differences.mean(), f"{key}/max": differences.max()}
    assert metrics == pytest.approx(expected, rel=1e-5)


@cases(
    ("settings", "has_gap"),
    [
        ({}, True),
        ({"dropout": 0.1}, False),
        ({"dropout": 0.1, "steps_per_generation": 2}, True),
        ({"neftune_noise_alpha": 5.0}, False),
        ({"neftune_noise_alpha": 5.0, "steps_per_generation": 2}, False),
    ],
)
def test_the_gap_is_measured_where_the_learner_s_pass_is_the_policy_that_sampled(
    settings: dict[str, Any], has_gap: bool
) -> None:
    """Dropout is off in a pass before the updates, which two batches need; noise is not."""
    metrics = algorithm_of(**settings).sampler_metrics([[micro_batch([[0.5]])]], FORWARD)
    assert ("sampling/logp_gap/mean" in metrics) == has_gap


@cases(
    ("settings", "held", "log_ratio"),
    [
        ({"output_regex": "a"}, -0.3, -0.3),
        ({"output_regex": "a", "sampling_correction": "sequence_truncate"}, -0.3, -0.7),
        ({"output_regex": "a", "sampling_correction": "none"}, -0.3, -0.7),
        ({"sampling_correction": "sequence_truncate"}, 0.0, -0.7),
        ({}, 0.0, -0.7),
        ({"dtype": mx.bfloat16}, 0.0, 0.0),
        ({"dtype": mx.bfloat16, "sampling_correction": "token_truncate"}, 0.0, -0.7),
        ({"dtype": mx.bfloat16, "output_regex": "a"}, -0.3, -0.3),
    ],
)
def test_automatic_corrects_for_grammar_and_rounding_but_not_for_filters(
    settings: dict[str, Any], held: float, log_ratio: float
) -> None:
    """What grammar and filters kept is 0.7 nats less than all, 0.3 of them the grammar's."""
    part = micro_batch([[0.0]], kept=-0.7, held=held)
    metrics = algorithm_of(**settings).sampler_metrics([[part]], FORWARD)
    assert metrics[f"{RATIO}/mean"] == pytest.approx(np.exp(log_ratio), rel=1e-5)
    assert metrics[f"{DIFFERENCE}/mean"] == pytest.approx(0.7, rel=1e-5)


def row(total: float, count: float) -> RowSums:
    return {"entropy": (total, count)}


def test_the_mean_is_over_tokens_and_its_error_over_completions() -> None:
    """Sums 2, 9 and 4 over 2, 3 and 4 tokens: the mean is 15 / 9; what is left of each is −4/3, 4 and −8/3."""
    found = means([row(2, 2), row(9, 3), row(4, 4)])
    assert found["entropy"] == pytest.approx(15 / 9)
    assert found["entropy_stderr"] == pytest.approx((3 / 2 * ((4 / 3) ** 2 + 16 + (8 / 3) ** 2)) ** 0.5 / 9)
    assert means([row(2, 2)]) == {"entropy": 1.0} and means([]) == means([row(0, 0)]) == {}


def test_each_row_has_the_sums_of_its_own_tokens() -> None:
    problem = Problem(0, "", [], [1], "")
    batch = pack(
        [Group(problem, [Completion([5, 6, 7][:count], [0.0] * count, "", "eos") for count in (3, 1)])], pad_id=0
    )
    logp_BT, entropy_BT = (
        mx.array([[-1.0, -2.0, -3.0], [-4.0, 9.0, 9.0]]),
        mx.array([[0.5, 0.25, 0.25], [2.0, 9.0, 9.0]]),
    )
    scores = TokenScores(logp_BT, entropy_BT)
    long, short = row_sums(batch, scores, logp_BT, TRL_DEFAULTS)
    assert (long, short) == ({"entropy": (1.0, 3.0), "kl": (0.0, 3.0)}, {"entropy": (2.0, 1.0), "kl": (0.0, 1.0)})
    assert "kl" not in row_sums(batch, scores, None, TRL_DEFAULTS)[0]


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
