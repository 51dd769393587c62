"""`Completion.mask`: tokens that the policy did not produce, such as a tool's result, are in the context and never
trained on."""

from __future__ import annotations

import math
import random
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import parse
from backend.models.policy import load_policy
from backend.training.batch import Batch, completion_metrics, pack
from backend.training.grpo import grpo_learner
from backend.types import Completion, Group, Problem
from tests.support.reference_forward import LONGEST, TEMPERATURE, G, P, rows_of, sampled_groups

pytestmark = pytest.mark.usefixtures("without_compiler")

EVERYTHING: dict[str, Any] = {
    "beta": 0.05, "epsilon": 0.3, "top_entropy_quantile": 0.63, "entropy_coef": 0.1, "sampling_correction": "token_truncate",
    "off_policy_mask_threshold": 0.4, "num_iterations": 2, "max_completion_length": LONGEST,
}  # fmt: skip
"""Every term that counts tokens; the corners of the clip lie far from any ratio."""


def learnt(model: Path, groups: list[Group], **settings: Any) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """(changes of the weights, metrics) of one step with micro-batches of 60 tokens."""
    about = {"data": "none", "num_layers": -1, "rank": 4, "batch_size": P, "group_size": G, "temperature": TEMPERATURE}
    config = parse({"model": str(model), "optimizer": "sgd", "learning_rate": 0.1, **about, **EVERYTHING, **settings})
    policy = load_policy(config)
    before = {name: np.array(x) for name, x in policy.trainable().items()}
    metrics = grpo_learner(policy, config, 1, micro_batch_tokens=60).learn(pack(groups, pad_id=0))
    return {name: np.array(x) - before[name] for name, x in policy.trainable().items()}, metrics


def random_groups(model: Path) -> list[Group]:
    return deepcopy(_drawn(model))


@cache
def _drawn(model: Path) -> list[Group]:
    return sampled_groups(load_policy(parse({"model": str(model), "data": "none"})).model)


def with_tool_results(groups: list[Group], seed: int = 0) -> list[Group]:
    """Some tokens of every completion masked, of one completion all."""
    rng = random.Random(seed)
    for i, (_, completion) in enumerate(rows_of(groups)):
        completion.mask = [int(i != 1 and (t == 0 or rng.random() < 0.6)) for t in range(len(completion.tokens))]
    return groups


def test_logps_of_masked_tokens_change_nothing(model: Path) -> None:
    """A tool's tokens have no log-probability: NaN there reaches no gradient and no metric."""
    changes, metrics = learnt(model, with_tool_results(random_groups(model)))
    groups = with_tool_results(random_groups(model))
    for _, completion in rows_of(groups):
        completion.logps = [
            logp if trained else math.nan for logp, trained in zip(completion.logps, completion.mask, strict=True)
        ]
        completion.log_kept = [
            kept if trained else -9.0 for kept, trained in zip(completion.log_kept, completion.mask, strict=True)
        ]
    same_changes, same_metrics = learnt(model, groups)
    assert metrics == same_metrics and metrics["grad_norm"] > 1e-3 and math.isfinite(metrics["loss"])
    assert all(np.array_equal(x, same_changes[name]) for name, x in changes.items())


def test_the_mask_reaches_the_batch_beside_padding_and_truncation() -> None:
    def completion(stop: Any, mask: list[int]) -> Completion:
        return Completion([5, 6, 7], [-1.0] * 3, "", stop, mask=mask)

    rows = [completion("eos", [1, 0, 1]), completion("length", [1, 0, 1]), completion("eos", [0, 0, 0])]
    rows += [Completion([5], [-1.0], "", "eos")]
    groups = [Group(Problem(0, "", [], [1, 2], ""), rows)]
    batch: Batch = pack(groups, pad_id=0)
    assert batch.mask_BT.tolist() == [[1, 0, 1], [1, 0, 1], [0, 0, 0], [1, 0, 0]] and batch.mask_BT.dtype == mx.float32
    assert batch.length_B.tolist() == [3, 3, 3, 1], "masked tokens are read all the same"
    truncated = pack(groups, pad_id=0, mask_truncated_completions=True)
    assert truncated.mask_BT.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]]
    counts = completion_metrics(groups)
    assert counts["num_tokens"] == 4 * 2 + 2 + 2 + 0 + 1
    assert (counts["completions/max_length"], counts["completions/min_length"]) == (2, 0)
