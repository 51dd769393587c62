"""The reference of the KL term: a copy that follows the policy, or an adapter of the base trained before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import Config, parse
from backend.models.policy import Policy, load_policy
from backend.runs import checkpoint
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.training.batch import Batch, pack
from backend.training.grpo import grpo_learner
from tests.support import random_models, small_run
from tests.support.adapters import save_adapters
from tests.support.reference_forward import plain_scores, rows_of, sampled_groups

ALPHA = 0.3
FOLLOWING: dict[str, Any] = {
    "sync_ref_model": True,
    "ref_model_mixup_alpha": ALPHA,
    "ref_model_sync_steps": 2,
    "beta": 0.05,
    "learning_rate": 1e-2,
}
TRAIN_TYPES = ["lora", "dora", "full"]


def config_of(models: Path, arch: str = "qwen3", **settings: Any) -> Config:
    folder = models / arch
    if not folder.exists():
        random_models.tiny_model(folder, arch, layers=1)
    about = {"data": "none", "num_layers": -1, "rank": 2, "batch_size": 3, "top_p": 1.0, "top_k": 0}
    return parse({"model": str(folder)} | about | settings)


def batch_for(policy: Policy, seed: int) -> Batch:
    return pack(sampled_groups(policy.model, seed=seed), pad_id=0)


def numbers(arrays: dict[str, mx.array]) -> dict[str, np.ndarray]:
    return {name: np.array(x) for name, x in arrays.items()}


def largest_difference(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    assert first.keys() == second.keys()
    return max(float(np.abs(x - second[name]).max()) for name, x in first.items())


def perturb(policy: Policy, amount: float = 0.1) -> None:
    """Add noise to the adapters, which start at zero."""
    mx.random.seed(1)
    policy.assign({name: x + amount * mx.random.normal(x.shape) for name, x in policy.trainable().items()})
    mx.eval(policy.model.parameters())


@pytest.mark.parametrize("train_type", TRAIN_TYPES)
def test_the_reference_starts_as_the_policy_and_moves_by_the_formula_at_its_interval(models: Path, train_type: str):
    """reference ← (1 − α)·reference + α·policy, after every second update; unchanged in between."""
    config = config_of(models, train_type=train_type, **FOLLOWING)
    policy = load_policy(config)
    learner = grpo_learner(policy, config, 5)
    expected = numbers(policy.trainable())
    assert largest_difference(numbers(policy.reference_arrays()), expected) == 0
    for update in range(1, 6):
        metrics = learner.learn(batch_for(policy, update))
        assert (metrics["kl"] == pytest.approx(0, abs=1e-8)) == (update == 1)
        weights = numbers(policy.trainable())
        if update % 2 == 0:
            expected = {name: (1 - ALPHA) * x + ALPHA * weights[name] for name, x in expected.items()}
        assert largest_difference(numbers(policy.reference_arrays()), expected) < 1e-6
        assert largest_difference(weights, expected) > 1e-3, "the policy has not changed, so this shows nothing"


def test_the_kl_is_against_where_the_reference_has_moved_to(models: Path) -> None:
    """By hand: the k3 estimate from two plain forward passes, the reference's with its own arrays put into a model."""
    config = config_of(models, **FOLLOWING)
    policy = load_policy(config)
    learner = grpo_learner(policy, config, 3)
    for update in (1, 2):
        learner.learn(batch_for(policy, update))
    groups = sampled_groups(policy.model, seed=3)
    moved = load_policy(config)
    moved.assign(policy.reference_arrays())
    metrics = learner.learn(pack(groups, pad_id=0))
    # The policy's own log-probabilities were changed by that update: they are taken from the run of two updates before.
    before = load_policy(config)
    again = grpo_learner(before, config, 3)
    for update in (1, 2):
        again.learn(batch_for(before, update))
    before.model.eval()
    assert metrics["kl"] == pytest.approx(k3(before.model, moved.model, groups), rel=1e-3)
    assert metrics["kl"] > 1e-6


def k3(policy: Any, reference: Any, groups: list[Any]) -> float:
    """The mean over all tokens of exp(d) − d − 1, d = log π_ref − log π, in float64."""
    rows = rows_of(groups)
    logp, ref = (np.array(plain_scores(model, rows)[0], np.float64) for model in (policy, reference))
    gaps = np.concatenate(
        [
            r[: len(completion.tokens)] - p[: len(completion.tokens)]
            for (_, completion), p, r in zip(rows, logp, ref, strict=True)
        ]
    )
    return float((np.exp(gaps) - gaps - 1).mean())


@pytest.mark.parametrize(
    "train_type", ["lora", pytest.param("dora", marks=pytest.mark.proof), pytest.param("full", marks=pytest.mark.proof)]
)
def test_a_resumed_run_has_the_same_reference(tmp_path: Path, train_type: str) -> None:
    """Stopped after step 3, where the reference has moved once and the policy since; α and interval as above."""
    raw = small_run.settings_for(tmp_path / "parts", train_type=train_type, iters=5, save_every=5, **FOLLOWING)
    raw |= small_run.low_half(tmp_path)
    unbroken, broken = RunFolder(tmp_path / "unbroken"), RunFolder(tmp_path / "broken")
    assert small_run.train_here(raw, unbroken).kind == "finished"

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 3:
            broken.say("stop")

    assert small_run.train_here(raw, broken, stop).step == 3
    assert small_run.train_here(raw, broken).kind == "finished"
    saved = [checkpoint.newest(run) for run in (unbroken, broken)]
    assert all(each is not None and each.state.step == 5 and each.has_reference for each in saved)
    for part in ("weights", "reference", "optimizer"):
        first, second = (numbers(checkpoint.arrays_of(each, part)) for each in saved)
        assert largest_difference(first, second) == 0, part
    kls = [[e["metrics"]["kl"] for e in read_events(run.events) if e["kind"] == "step"] for run in (unbroken, broken)]
    assert kls[0] == kls[1] and kls[0][-1] > 0


def adapter(models: Path, folder: Path, arch: str = "qwen3", **settings: Any) -> Path:
    """An adapter folder as a finished run has it."""
    config = config_of(models, arch, beta=0, **settings)
    policy = load_policy(config)
    perturb(policy)
    save_adapters(policy, config, folder)
    return folder
