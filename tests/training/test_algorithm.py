"""An algorithm is one file: a supervised warm-up and DPO, written here through the interface that GRPO uses, take the
steps that plain automatic differentiation of their formulas gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from backend.config.config import Config, parse
from backend.engine.lm_head import TokenScores
from backend.models.policy import Policy, load_policy
from backend.training.batch import Batch, pack
from backend.training.learner import Algorithm, Learner, build_learner
from backend.training.losses import Tally, token_mean
from backend.training.policy_forward import MicroBatch
from backend.types import Group
from tests.support import random_models
from tests.support.reference_forward import TEMPERATURE, G, P, padded, plain_scores, rows_of, sampled_groups
from tests.support.small_settings import PLAIN_SGD, SMALL_LORA

RATE = 0.02


@dataclass
class Supervised(Algorithm):
    """Cross-entropy of the completions, the mean over all tokens of the batch."""

    def learn(self, batch: Batch, learner: Learner) -> dict[str, float]:
        batch = replace(batch, weight_BT=batch.mask_BT / batch.mask_BT.sum())
        micro_batches = learner.forward.micro_batches(learner.policy.split_model, batch)
        return learner.update(micro_batches, self.loss)

    def loss(self, micro_batch: MicroBatch, scores: TokenScores, totals: Any) -> tuple[mx.array, Tally]:
        batch = micro_batch.batch
        return -(scores.logp_N * batch.weight_BT).sum(), {"mean": {"nll": token_mean(-scores.logp_N, batch.mask_BT)}}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    model = random_models.tiny_model(tmp_path_factory.mktemp("models") / "qwen3", layers=1)
    sizes = {"batch_size": P, "group_size": G}
    learning = {"learning_rate": RATE, "temperature": TEMPERATURE, "beta": 0.1}
    return parse({"model": str(model)} | SMALL_LORA | PLAIN_SGD | sizes | learning)


def policy_of(config: Config) -> Policy:
    """A policy with non-zero adapters, the same at every call."""
    policy = load_policy(config)
    mx.random.seed(0)
    policy.assign({name: x + 0.05 * mx.random.normal(x.shape) for name, x in policy.trainable().items()})
    mx.eval(policy.model.parameters())
    return policy


def plain_step(config: Config, loss: Callable[[nn.Module], mx.array]) -> tuple[float, dict[str, np.ndarray]]:
    """(the loss, the changes of one step of gradient descent), by automatic differentiation of the whole batch at
    once."""
    policy = policy_of(config)

    def of_weights(weights: dict[str, mx.array]) -> mx.array:
        policy.model.update(tree_unflatten(list(weights.items())))
        return loss(policy.model)

    value, gradient = mx.value_and_grad(of_weights)(policy.trainable())
    return float(value), {name: -RATE * np.array(x) for name, x in gradient.items()}


def learnt(
    config: Config, algorithm: Algorithm, groups: list[Group], tokens: int
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """(metrics, changes of the weights) of one step with micro-batches of `tokens` tokens."""
    policy = policy_of(config)
    before = {name: np.array(x) for name, x in policy.trainable().items()}
    learner = build_learner(policy, algorithm, config, 1, micro_batch_tokens=tokens)
    metrics = learner.learn(pack(groups, pad_id=0))
    assert learner.updates == 1
    return metrics, {name: np.array(x) - before[name] for name, x in policy.trainable().items()}


def assert_same_changes(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    largest = max(np.abs(x).max() for x in expected.values())
    assert largest > 1e-4, "nothing has changed, so this shows nothing"
    assert all(np.abs(x - expected[name]).max() < 1e-4 * largest for name, x in actual.items())


@pytest.mark.parametrize("tokens", [10**6, 30], ids=["one micro-batch", "several micro-batches"])
def test_a_supervised_warm_up_takes_the_step_of_plain_autodiff(config: Config, tokens: int) -> None:
    groups = sampled_groups(policy_of(config).model)
    rows = rows_of(groups)
    mask = mx.array(padded([[1.0] * len(completion.tokens) for _, completion in rows]))

    def cross_entropy(model: nn.Module) -> mx.array:
        return -(plain_scores(model, rows)[0] * mask).sum() / mask.sum()

    loss, changes = plain_step(config, cross_entropy)
    metrics, learned_changes = learnt(config, Supervised(), groups, tokens)
    assert_same_changes(learned_changes, changes)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5) == pytest.approx(metrics["nll"], rel=1e-5)
    assert metrics.keys() == {"loss", "nll", "grad_norm", "learning_rate"}, "nothing of GRPO's"
