"""The table of losses: TRL's numbers, numbers computed by hand, and invariances."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.training.batch import pack
from backend.training.losses import (
    LEVELS,
    LOSSES,
    TRL_DEFAULTS,
    Tally,
    entropy_quantile,
    merge,
    policy_loss,
    policy_terms,
    token_weights,
)
from backend.types import Completion, Group, Problem
from tests.support.cases import cases

GOLDEN = Path(__file__).parents[1] / "golden"
INPUTS = json.loads((GOLDEN / "loss_inputs.json").read_text())
CASES = json.loads((GOLDEN / "loss_cases.json").read_text())
OUR_NAMES = {
    "clip_ratio/low_mean": "clip_ratio_low",
    "clip_ratio/high_mean": "clip_ratio_high",
    "clip_ratio/region_mean": "clip_ratio_total",
}
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
BETA = 0.04


def loss_and_gradient(logps: mx.array, *args: Any, **settings: Any) -> tuple[mx.array, dict[str, mx.array], np.ndarray]:
    (loss, metrics), gradient = mx.value_and_grad(lambda x: policy_loss(x, *args, **settings))(logps)
    return loss, metrics, np.array(gradient)


def golden_arguments(case: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    arrays = {name: mx.array(value, mx.float32) for name, value in INPUTS[case["input"]].items()}
    config = {"loss_type": "dapo", "max_completion_length": 16, **case["config"]}
    extra: dict[str, Any] = {"entropies": arrays["entropies"], "num_items": arrays["num_items_in_batch"]}
    old = arrays["old_logps"] if case.get("use_old", True) else None
    ref = arrays["ref_logps"] if config.get("beta", 0) else None
    if "off_policy_mask_threshold" in config:
        extra["sampling_logps"] = arrays["sampling_logps"]
    if case.get("use_is"):
        extra["is_ratio"] = arrays["is_ratio_token"]
    mask = packed_mask(**INPUTS[case["input"]]) if "tool_mask" in arrays else arrays["completion_mask"]
    return [arrays["logps"], old, ref, arrays["advantages"], mask], config | extra


def packed_mask(completion_mask: list[list[int]], tool_mask: list[list[int]], **_: Any) -> mx.array:
    """The mask of completions in which tools wrote the tokens that TRL's tool_mask marks with 0."""
    counts = map(sum, completion_mask)
    masks = [mask[:count] for mask, count in zip(tool_mask, counts, strict=True)]
    completions = [Completion([5] * len(mask), [0.0] * len(mask), "", "eos", mask=mask) for mask in masks]
    return pack([Group(Problem(0, "", [], [1, 2], ""), completions)], pad_id=0).mask_BT


@cases("case", CASES)
def test_loss_gradient_and_metrics_equal_trls(case: dict[str, Any]) -> None:
    arguments, config = golden_arguments(case)
    loss, metrics, gradient = loss_and_gradient(*arguments, **config)
    np.testing.assert_allclose(float(loss), case["out"]["loss"], **CLOSE)
    np.testing.assert_allclose(gradient, case["out"]["dlogps"], **CLOSE)
    expected = {OUR_NAMES.get(name, name): float(value) for name, value in case["out"]["metrics"].items()}
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(float(metrics[name]), value, err_msg=name, **CLOSE)


def rows(*values: list[float]) -> mx.array:
    return mx.array(values, mx.float32)


RATIOS = rows([1.5, 1.0], [0.5, 9.0])
ADVANTAGES = mx.array([1.0, -1.0])
MASK = rows([1, 1], [1, 0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_on_policy_every_loss_is_the_policy_gradient(loss_type: str, level: str) -> None:
    mask = rows([1, 1, 1], [1, 1, 0])
    advantages = mx.array([0.7, -1.3])
    settings = {"loss_type": loss_type, "max_completion_length": 8}
    _, _, gradient = loss_and_gradient(
        rows([-1, -2, -3], [-1, -2, 0]),
        None,
        None,
        advantages,
        mask,
        importance_sampling_level=level,
        epsilon_high=5.0,
        **settings,
    )
    weights = token_weights(mask, **settings)
    np.testing.assert_allclose(gradient, -np.array(advantages)[:, None] * np.array(weights), rtol=1e-6, atol=1e-9)


def test_vespo_has_the_importance_correction_inside_its_weight_only() -> None:
    # Row 1: log w = 0.1 + 0.2 from the policy, log ½ from the correction; φ = e^{3 + 2·log w − 3w}. Row 2 has one
    # token, log w = −0.3 + log 2, and A < 0: φ = e^{2 + 3·log w − 2w}.
    first, second = 0.3 + math.log(0.5), -0.3 + math.log(2)
    phi = math.exp(3 + 2 * first - 3 * math.exp(first)), math.exp(2 + 3 * second - 2 * math.exp(second))
    for correction in (rows([0.5, 1.0], [2.0, 9.0]), rows([0.5], [2.0])):
        loss, metrics = policy_loss(
            rows([-0.9, -0.8], [-1.3, -9.0]),
            rows([-1.0, -1.0], [-1.0, -1.0]),
            None,
            ADVANTAGES,
            MASK,
            loss_type="vespo",
            is_ratio=correction,
        )
        assert float(metrics["vespo/phi_seq_mean"]) == pytest.approx(sum(phi) / 2, rel=1e-5)
        # And not once more outside of it.
        assert float(loss) == pytest.approx((phi[0] * (0.9 + 0.8) - phi[1] * 1.3) / 3, rel=1e-5)


ENTROPIES = rows([0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 99.0, 99.0])
ENTROPY_MASK = rows([1, 1, 1, 1], [1, 1, 0, 0])


@cases(
    ("top", "has_gradient"),
    [
        (1.0, [[1, 1, 1, 1], [1, 1, 0, 0]]),
        (0.5, [[0, 0, 0, 1], [1, 1, 0, 0]]),
        (0.2, [[0, 0, 0, 0], [1, 1, 0, 0]]),  # the fifth of six lies exactly at the quantile: ties are kept
        (0.1, [[0, 0, 0, 0], [0, 1, 0, 0]]),
        (0.0, [[0, 0, 0, 0], [0, 1, 0, 0]]),
    ],
)
def test_only_tokens_at_or_above_the_entropy_quantile_get_a_gradient(top: float, has_gradient: list[list[int]]) -> None:
    zeros = mx.zeros((2, 4))
    _, _, gradient = loss_and_gradient(
        zeros, zeros, None, mx.ones(2), ENTROPY_MASK, entropies=ENTROPIES, top_entropy_quantile=top
    )
    np.testing.assert_array_equal(gradient != 0, np.array(has_gradient) == 1)


@cases("loss_type", LOSSES)
def test_the_entropy_bonus_is_the_mean_entropy_whatever_the_loss(loss_type: str) -> None:
    settings: dict[str, Any] = {"loss_type": loss_type, "max_completion_length": 4, "entropy_coef": 0.1}
    for mask, mean in ((ENTROPY_MASK, 0.35), (rows([0, 0, 1, 0], [0, 0, 0, 0]), 0.3)):
        arguments = (mx.zeros((2, 4)), None, None, ADVANTAGES, mask)
        loss, metrics = policy_loss(*arguments, entropies=ENTROPIES, **settings)
        assert float(metrics["policy_loss"] - loss) == pytest.approx(0.1 * mean, rel=1e-5)
        assert float(metrics["entropy_coef"]) == pytest.approx(0.1)
        assert float(metrics["entropy"]) == pytest.approx(mean)
        gradient = mx.grad(lambda x, call=arguments: policy_loss(*call, entropies=x, **settings)[0])(ENTROPIES)
        np.testing.assert_allclose(np.array(gradient), -0.1 * np.array(mask / mask.sum()), rtol=1e-5)


def settings_of(loss_type: str, seed: int) -> dict[str, Any]:
    """Settings that turn on every term that depends on the whole batch."""
    level = list(LEVELS)[seed % 3]
    return {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon_high": 0.28,
        "beta": BETA,
        "max_completion_length": 7,
        "top_entropy_quantile": (1.0, 0.6)[seed % 2],
        "entropy_coef": (0.0, 0.05)[seed // 2 % 2],
        "off_policy_mask_threshold": (None, 0.1)[seed // 4 % 2],
    }


def random_batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    n, width = rng.integers(1, 7), rng.integers(1, 6)
    logps = rng.normal(-1.5, 0.6, (n, width))
    near = {name: logps + rng.normal(0, 0.3, (n, width)) for name in ("old", "ref", "sampler")}
    return {
        "logps": logps,
        **near,
        "advantages": rng.normal(0, 1, n),
        "mask": np.arange(width) < rng.integers(0, width + 1, (n, 1)),
        "entropies": np.abs(rng.normal(0, 2, (n, width))),
    }


def run(batch: dict[str, np.ndarray], **settings: Any) -> tuple[float, Tally, np.ndarray]:
    """(loss, tally, gradient in the log-probabilities); `settings` may hold `weights` and `entropy_tokens` of a whole
    batch, and `batch` its `uncertain` tokens."""
    a = {name: mx.array(x.astype(np.float32)) for name, x in batch.items()}
    weights = settings.pop("weights", None)
    entropy_tokens = settings.pop("entropy_tokens", None)

    def terms(logps: mx.array) -> tuple[mx.array, Tally]:
        loss, tally, _ = policy_terms(
            logps,
            a["old"],
            a["ref"],
            a["advantages"],
            a["mask"],
            replace(TRL_DEFAULTS, **settings),
            entropies=a["entropies"],
            sampling_logps=a["sampler"],
            weights=None if weights is None else mx.array(weights),
            uncertain=a.get("uncertain"),
            entropy_tokens=entropy_tokens,
        )
        return loss, tally

    (loss, tally), gradient = mx.value_and_grad(terms)(a["logps"])
    return float(loss), tally, np.array(gradient)


def totals_of(batch: dict[str, np.ndarray], settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, mx.array]:
    """Weights, uncertain tokens and count of the bonus's tokens, as an algorithm computes them before the split."""
    mask, entropies = mx.array(batch["mask"]), mx.array(batch["entropies"].astype(np.float32))
    names = ("loss_type", "max_completion_length")
    counted = mask
    if settings["top_entropy_quantile"] < 1:
        counted = mask & (entropies >= entropy_quantile(entropies, mask, settings["top_entropy_quantile"]))
    weights = token_weights(mask, **{name: settings[name] for name in names})
    return np.array(weights), np.array(counted), counted.sum()


def assert_same(actual: float, expected: float) -> None:
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)


seeds = st.integers(0, 2**31)
every_loss = pytest.mark.parametrize("loss_type", LOSSES)
few = settings(max_examples=8, deadline=None, derandomize=True)


@every_loss
@few
@given(seed=seeds, data=st.data())
def test_splitting_the_batch_changes_no_gradient_and_no_metric(loss_type: str, seed: int, data: st.DataObject) -> None:
    batch, options = random_batch(seed), settings_of(loss_type, seed)
    loss, tally, gradient = run(batch, **options)
    weights, batch["uncertain"], tokens = totals_of(batch, options)
    n = len(weights)
    part_of = np.array(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    parts = [np.flatnonzero(part_of == i) for i in range(3) if (part_of == i).any()]
    results = [
        run({k: x[i] for k, x in batch.items()}, weights=weights[i], entropy_tokens=tokens, **options) for i in parts
    ]
    assert_same(sum(r[0] for r in results), loss)
    for part, (_, _, share) in zip(parts, results, strict=True):
        np.testing.assert_allclose(share, gradient[part], rtol=1e-4, atol=1e-6)
    merged, expected = merge([r[1] for r in results]), merge([tally])
    assert set(merged) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(float(merged[name]), float(value), rtol=1e-4, atol=1e-6, err_msg=name)


@every_loss
@few
@given(seed=seeds, extra=st.integers(1, 4))
def test_masked_positions_are_never_read_even_if_nan(loss_type: str, seed: int, extra: int) -> None:
    batch, options = random_batch(seed), settings_of(loss_type, seed)
    loss, tally, gradient = run(batch, **options)
    padded = {
        k: x if x.ndim == 1 else np.pad(x, [(0, 0), (0, extra)], constant_values=0 if k == "mask" else np.nan)
        for k, x in batch.items()
    }
    loss_with_nan, tally_with_nan, wider = run(padded, **options)
    assert_same(loss_with_nan, loss)
    np.testing.assert_allclose(wider[:, :-extra], gradient, rtol=1e-4, atol=1e-6)
    assert not wider[:, -extra:].any()
    for name, value in merge([tally]).items():
        np.testing.assert_allclose(
            float(merge([tally_with_nan])[name]), float(value), rtol=1e-4, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize(
    ("settings", "clipped"),
    [
        ({}, [[1, 0], [1, 0]]),
        ({"loss_type": "cispo", "epsilon_high": 1.2}, [[1, 0], [0, 0]]),
        ({"loss_type": "sapo"}, [[0, 0], [0, 0]]),
    ],
    ids=["grpo", "cispo", "sapo"],
)
def test_what_is_recorded_of_a_token_is_what_the_loss_made_of_it(settings: dict[str, Any], clipped: list[list[int]]):
    # The least certain three quarters carry the policy term, all tokens but the second.
    _, _, values = policy_terms(
        mx.log(RATIOS),
        mx.zeros((2, 2)),
        None,
        ADVANTAGES,
        rows([1, 1], [1, 1]),
        replace(TRL_DEFAULTS, top_entropy_quantile=0.75, **settings),
        entropies=rows([0.9, 0.1], [0.8, 0.7]),
        importance_weight=rows([0.25], [2.0]),
    )
    np.testing.assert_allclose(np.array(values.ratio_BT), np.array(RATIOS), rtol=1e-6)
    np.testing.assert_array_equal(np.array(values.clipped_BT), clipped)
    np.testing.assert_allclose(np.array(values.advantage_BT), [[0.25, 0], [-2, -2]])
