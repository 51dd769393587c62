"""Packing, splitting into micro-batches, length metrics and the importance correction."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.runs.completion_rows import Stop
from backend.training.batch import Batch, completion_metrics, pack
from backend.training.importance_sampling import importance_ratio, logp_gap
from backend.training.losses import TRL_DEFAULTS, merge, policy_terms, token_weights
from backend.types import Completion, Group, Problem
from tests.support.cases import cases

GOLDEN = Path(__file__).parents[1] / "golden"
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
PAD = 99


def completion(tokens: list[int], stop: Stop = "eos", advantage: float = 1.0) -> Completion:
    return Completion(tokens, [-t / 10 for t in tokens], "", stop, advantage=advantage)


def group(prompt: list[int], *completions: Completion) -> Group:
    return Group(Problem(0, "", [], prompt, ""), list(completions))


TWO_GROUPS = [
    group([1, 2, 3], completion([4, 5], advantage=0.5), completion([6], advantage=-0.5)),
    group([7], completion([8, 9, 10, 11], stop="length", advantage=0.0), completion([], advantage=2.0)),
]


def test_pack_pads_on_the_right() -> None:
    batch = pack(TWO_GROUPS, pad_id=PAD)
    assert batch.tokens_BL.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 6, PAD], [7, 8, 9, 10, 11], [7, PAD, PAD, PAD, PAD]]
    assert batch.completion_BT.tolist() == [[4, 5, PAD, PAD], [6, PAD, PAD, PAD], [8, 9, 10, 11], [PAD] * 4]
    assert batch.mask_BT.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    np.testing.assert_allclose(np.array(batch.sampling_logp_BT)[0], [-0.4, -0.5, 0, 0])
    assert batch.log_kept_BT.tolist() == [[0.0] * 4] * 4, "nothing was cut, and padding weighs nothing"
    assert batch.prompt_length_B.tolist() == [3, 3, 1, 1]
    assert batch.length_B.tolist() == [2, 1, 4, 0]
    assert batch.advantage_B.tolist() == [0.5, -0.5, 0, 2]
    assert (batch.group_B.tolist(), batch.row_B.tolist()) == ([0, 0, 1, 1], [0, 1, 2, 3])
    assert batch.mask_BT.dtype == mx.float32
    assert batch.weight_BT is batch.old_logp_BT is batch.ref_logp_BT is batch.log_held_BT is None


def test_truncated_completions_are_masked_when_asked() -> None:
    assert pack(TWO_GROUPS, pad_id=PAD, mask_truncated_completions=True).mask_BT[2].tolist() == [0, 0, 0, 0]


def random_groups(seed: int) -> list[Group]:
    rng = random.Random(seed)

    def random_completion() -> Completion:
        tokens = [rng.randrange(50) for _ in range(rng.randrange(7))]
        return completion(tokens, rng.choice(["eos", "length"]), rng.choice([0.0, rng.gauss(0, 1)]))

    return [group([1] * rng.randint(1, 5), *(random_completion() for _ in range(4))) for _ in range(rng.randint(1, 3))]


def toy_policy(w: mx.array, batch: Batch) -> mx.array:
    """Log-probabilities [B, T] that depend on the weights, the token and the tokens before it, as a model's do."""
    before_BL = mx.cumsum(mx.where(batch.tokens_BL == PAD, 0, batch.tokens_BL), axis=1)
    place_BT = batch.prompt_length_B[:, None] + mx.arange(batch.mask_BT.shape[1]) - 1
    context_BT = mx.take_along_axis(before_BL, mx.minimum(place_BT, before_BL.shape[1] - 1), axis=1)
    return -mx.abs(w[batch.completion_BT % 7]) - 1e-3 * context_BT * w[0]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    limits=st.fixed_dictionaries(
        {"rows": st.none() | st.integers(1, 5), "token_budget": st.none() | st.integers(1, 60)}
    ),
    prompts=st.sampled_from(["prefilled", "per_micro_batch", "per_row"]),
    loss_type=st.sampled_from(["grpo", "bnpo", "dr_grpo", "luspo"]),
)
def test_any_split_gives_the_same_loss_gradient_and_metrics(
    seed: int, limits: dict[str, Any], prompts: Any, loss_type: str
) -> None:
    batch = pack(random_groups(seed), pad_id=PAD, mask_truncated_completions=seed % 2 == 0)
    w = mx.array(np.random.default_rng(seed).normal(-1, 0.3, 7).astype(np.float32))
    batch = replace(
        batch,
        weight_BT=token_weights(batch.mask_BT, loss_type=loss_type, max_completion_length=6),
        old_logp_BT=toy_policy(w + 0.1, batch),
        ref_logp_BT=toy_policy(w - 0.1, batch),
    )

    def learn(parts: list[Batch], beta: float = 0.1) -> tuple[float, np.ndarray, dict[str, float]]:
        def terms(w: mx.array, part: Batch) -> Any:
            arrays = (part.old_logp_BT, part.ref_logp_BT, part.advantage_B, part.mask_BT)
            settings = replace(TRL_DEFAULTS, beta=beta, loss_type=loss_type, epsilon=0.05)
            return policy_terms(toy_policy(w, part), *arrays, settings, weights=part.weight_BT)[:2]

        shares = [mx.value_and_grad(terms)(w, part) for part in parts]
        metrics = {name: float(x) for name, x in merge([tally for (_, tally), _ in shares]).items()}
        return sum(float(s) for (s, _), _ in shares), np.array(sum(g for _, g in shares)), metrics

    loss, gradient, metrics = learn([batch])
    split_loss, split_gradient, split_metrics = learn(list(batch.micro_batches(**limits, prompts=prompts)))
    assert split_loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(split_gradient, gradient, rtol=1e-4, atol=1e-6)
    assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6, nan_ok=True)
    signal = list(batch.with_signal().micro_batches(**limits))
    if signal:
        np.testing.assert_allclose(learn(signal, 0.0)[1], learn([batch], 0.0)[1], rtol=1e-4, atol=1e-6)


GENERATIONS = [c for c in json.loads((GOLDEN / "generation_metrics.json").read_text()) if "completion_ids" in c]


def golden_groups(case: dict[str, Any]) -> list[Group]:
    ended = (case["eos"], case["pad"])
    return [
        group([5] * length, completion(ids, "eos" if ids[-1] in ended else "length"))
        for ids, length in zip(case["completion_ids"], case["prompt_lengths"], strict=True)
    ]


@cases("case", GENERATIONS)
def test_length_metrics_equal_trls(case: dict[str, Any]) -> None:
    groups = golden_groups(case)
    if "env_mask" in case:  # tokens that an environment wrote are not the model's: they do not count
        for g, mask in zip(groups, case["env_mask"], strict=True):
            g.completions[0].mask = mask
    actual = completion_metrics(groups)
    assert actual.pop("hit_max_tokens_ratio") == actual["completions/clipped_ratio"]
    assert set(actual) == set(case["out"]["metrics"])
    for name, value in case["out"]["metrics"].items():
        np.testing.assert_allclose(actual[name], value, err_msg=name, **CLOSE)
    batch = pack(groups, pad_id=case["pad"], mask_truncated_completions=case["mask_truncated_completions"])
    mask = np.array(case["out"]["completion_mask"]) * np.array(case["out"].get("tool_mask", 1))
    assert batch.mask_BT.tolist() == mask.tolist() and mask.sum() == case["out"]["num_items_in_batch"]


CORRECTIONS = json.loads((GOLDEN / "is_correction.json").read_text())


def correction_arrays(case: dict[str, Any]) -> tuple[mx.array, mx.array, mx.array]:
    old, ragged = case["old_logps"], case["sampling_logps"]
    sampling = [row + [-7.0] * (len(old[0]) - len(row)) for row in ragged]  # padding must not be read
    mask = [[1.0] * len(row) + [0.0] * (len(old[0]) - len(row)) for row in ragged]
    return mx.array(old), mx.array(sampling), mx.array(mask)


@cases("case", CORRECTIONS)
def test_the_importance_correction_equals_trls(case: dict[str, Any]) -> None:
    ratio, metrics = importance_ratio(*correction_arrays(case), case["mode"], case["clip_min"], case["clip_max"])
    np.testing.assert_allclose(np.array(ratio), case["out"]["importance_sampling_ratio"], **CLOSE)
    assert set(metrics) == set(case["out"]["metrics"])
    for name, value in case["out"]["metrics"].items():
        np.testing.assert_allclose(float(metrics[name]), value, err_msg=name, **CLOSE)


def test_the_gap_is_between_two_policies_before_any_filter() -> None:
    # The sampler's policy gave the tokens −0.5 − 0.25 and −1 − 1.5. The third token it could not score, the fourth is
    # padding.
    policy, sampling = mx.array([[-1.0, -2.0, -9.0, -9.0]]), mx.array([[-0.5, -1.0, float("nan"), -7.0]])
    kept, mask = mx.array([[-0.25, -1.5, 0.0, 0.0]]), mx.array([[1.0, 1.0, 1.0, 0.0]])
    gap = {name: float(x) for name, x in logp_gap(policy, sampling, kept, mask).items()}
    assert gap == {"sampling/logp_gap/mean": 0.375, "sampling/logp_gap/max": 0.5}
    assert {float(x) for x in logp_gap(policy, sampling, kept, 0 * mask).values()} == {0}
