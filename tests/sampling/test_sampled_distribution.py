"""The metrics that compare the distribution that was sampled from with the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.config.config import parse
from backend.models.policy import Policy, load_policy
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.training.batch import pack
from backend.training.grpo import grpo_learner
from backend.types import Problem
from tests.support import random_models
from tests.support.reference_forward import TEMPERATURE

FILTERED = Sampling(TEMPERATURE, top_p=0.8, top_k=60, min_p=0.1)


def policy_of(models: Path, arch: str = "qwen3", **settings: Any) -> Policy:
    folder = models / arch
    if not folder.exists():
        random_models.tiny_model(folder, arch)
    return load_policy(parse({"model": str(folder), "data": "none", "beta": 0, "num_layers": -1} | settings))


def prompts() -> list[Problem]:
    rng = np.random.default_rng(0)
    return [Problem(i, "", [], rng.integers(60, 320, length).tolist(), "") for i, length in enumerate([1, 4, 9])]


def gaps(models: Path, sampling: Sampling, **settings: Any) -> tuple[dict[str, float], list[float]]:
    """The metrics of a training step on completions sampled with `sampling`, and log_kept of each of their tokens."""
    names = ("temperature", "top_p", "top_k", "min_p")
    filters = {name: getattr(sampling, name) for name in names}
    about = {"batch_size": 3, "group_size": 3, "skip_zero_signal": False} | filters | settings
    policy = policy_of(models, **about)
    config = parse({"model": str(models / "qwen3"), "data": "none", "beta": 0, "num_layers": -1} | about)
    groups = Sampler(policy, 8).sample(prompts(), 3, sampling, seed=0, first_number=0)
    for group in groups:
        for completion, advantage in zip(group.completions, (1.0, -1.0, 0.0), strict=True):
            completion.advantage = advantage
    kept = [x for group in groups for completion in group.completions for x in completion.log_kept]
    return grpo_learner(policy, config, 1).learn(pack(groups, pad_id=0)), kept


def test_the_importance_ratio_is_the_mass_that_was_kept(models: Path) -> None:
    """The kept share was once read at the last token of the vocabulary, and NaN where that was filtered."""
    metrics, kept = gaps(models, FILTERED)
    assert max(kept) < 0 or min(kept) < -0.1, "nothing was filtered, so this shows nothing"
    for name, share in (("mean", np.exp(kept).mean()), ("min", np.exp(min(kept))), ("max", np.exp(max(kept)))):
        assert metrics[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(share, abs=1e-4)
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(-np.mean(kept), abs=1e-4)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(-min(kept), abs=1e-4)


@pytest.mark.parametrize("settings", [{"num_iterations": 2}, {"sampling_correction": "sequence_mask"}], ids=str)
def test_without_filters_the_sampler_is_the_policy(models: Path, settings: dict[str, Any]) -> None:
    metrics, kept = gaps(models, Sampling(TEMPERATURE), **settings)
    assert set(kept) == {0.0}
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["sampling/importance_sampling_ratio/min"] > 0.999
    assert metrics["sampling/importance_sampling_ratio/max"] < 1.001
