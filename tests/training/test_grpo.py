"""The algorithm's own bookkeeping, without a model: what the settings make of it, and how the metrics of micro-batches
become a step's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import Config, parse
from backend.engine.lm_head import TokenScores
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


def test_tokens_at_the_entropy_threshold_count_for_the_bonus() -> None:
    """Of the entropies 1, 2, 2, 2 and 5 the upper half begins at 2, and four tokens have at least that; a sixth is
    masked."""
    algorithm = algorithm_of(top_entropy_quantile=0.5, entropy_coef=0.1)
    parts: Any = [
        SimpleNamespace(batch=SimpleNamespace(mask_BT=mx.array(mask)), entropy_N=mx.array(entropies))
        for entropies, mask in (([[1.0, 2.0], [2.0, 5.0]], [[1.0, 1.0], [1.0, 1.0]]), ([[2.0, 9.0]], [[1.0, 0.0]]))
    ]
    forward: Any = SimpleNamespace(ranks=ALONE, scores=lambda model, part, with_gradient: part)
    totals = algorithm.batch_totals(parts, forward)
    assert {name: x.item() for name, x in totals.items()} == {"entropy_threshold": 2.0, "entropy_tokens": 4.0}


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
