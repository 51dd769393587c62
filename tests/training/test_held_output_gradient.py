"""Held output is sampled from another distribution than the policy; the corrected gradient is the policy's all the
same.

The objective is J = Σ π(y) R(y) over the outputs y of the grammar: with so short a grammar all of them can be written
down, and so can ∇J.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from backend.config.config import Config, parse
from backend.models.policy import Policy, load_policy
from backend.sampling.grammar import CompiledGrammar, Grammar
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.training.batch import pack
from backend.training.grpo import correction_mode, grpo_learner
from backend.types import Problem
from tests.support import random_models
from tests.support.small_settings import PLAIN_SGD, UNFILTERED

REGEX, LONGEST, BATCH, BATCHES = "(7|th)[ae]?", 4, 96, 12
PROMPT = [70, 71, 72]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.tiny_model(tmp_path_factory.mktemp("toy") / "model", noise=0.1)


def settings(folder: Path, **changes: Any) -> Config:
    """SGD with rate 1 from a loss that is a plain mean: the step that the weights take is the gradient."""
    raw = {"model": str(folder), "data": "none", "num_layers": 1, "rank": 2, "output_regex": REGEX}
    loss = {"grpo_loss_type": "dr_grpo", "beta": 0, "temperature": 1, "learning_rate": 1.0}
    sizes = {"max_completion_length": LONGEST, "batch_size": 1, "group_size": BATCH}
    return parse(raw | UNFILTERED | PLAIN_SGD | loss | sizes | changes)


def toy(config: Config) -> Policy:
    """A policy with adapters that change something, and to which the grammar's tokens are about as likely as others."""
    policy = load_policy(config)
    mx.random.seed(1)
    policy.model.update(tree_map(lambda x: x + 0.5 * mx.random.normal(x.shape), policy.model.trainable_parameters()))
    table = policy.model.model.embed_tokens  # pyright: ignore
    likely = mx.zeros((table.weight.shape[0], 1)).at[mx.array([token for y in outputs(policy) for token in y])].add(1)
    table.weight = mx.where(likely > 0, table.weight, 0.2 * table.weight)
    return policy


def outputs(policy: Policy) -> list[list[int]]:
    """Every output of the grammar, in every way of writing it in tokens, with its end of sequence."""
    size = policy.split_model.vocab_size
    compiled = CompiledGrammar(Grammar("regex", REGEX), policy.tokenizer, policy.eos_ids, size)
    found, pending = [], [([], compiled.matcher())]
    while pending:
        tokens, matcher = pending.pop()
        bits = np.unpackbits(compiled.masks([matcher])[0].view(np.uint8), bitorder="little")[:size]
        for token in np.flatnonzero(bits).tolist():
            if token in policy.eos_ids:
                found.append([*tokens, token])
                continue
            following = matcher.deep_copy()
            following.consume_token(token)
            pending.append(([*tokens, token], following))
    return found


def reward(tokens: list[int]) -> float:
    return float(np.sin(sum(tokens) + len(tokens)))


def exact_gradient(policy: Policy) -> np.ndarray:
    """∇J / LONGEST, as the loss divides by it, by autodiff of the sum over all outputs."""

    def objective(parameters: Any) -> mx.array:
        policy.model.update(parameters)
        total = mx.array(0.0)
        for y in outputs(policy):
            logits = policy.model(mx.array([PROMPT + y]))[0, len(PROMPT) - 1 : -1]  # pyright: ignore
            logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            total = total + mx.exp(mx.take_along_axis(logps, mx.array(y)[:, None], axis=-1).sum()) * reward(y)
        return total / LONGEST

    parameters = policy.model.trainable_parameters()
    gradient = mx.grad(objective)(parameters)
    policy.model.update(parameters)
    return flat(gradient)


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.array(array, np.float64).reshape(-1) for _, array in sorted(tree_flatten(tree))])


def estimated_gradients(policy: Policy, config: Config) -> np.ndarray:
    """[BATCHES, parameters]: what the learner makes of as many batches of held samples."""
    parameters = policy.model.trainable_parameters()
    rollout, learner = Sampler(policy, LONGEST), grpo_learner(policy, config, 1)
    rows = []
    for number in range(BATCHES):
        groups = rollout.sample([Problem(0, "", [], PROMPT, "")], BATCH, Sampling.of(config), 0, number)
        for completion in groups[0].completions:
            completion.advantage = reward(completion.tokens)
        learner.learn(pack(groups, pad_id=0))
        rows.append(flat(policy.model.trainable_parameters()) - flat(parameters))
        policy.set_parameters(parameters)
    return np.stack(rows)


def standard_errors_off(gradients: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """How far the mean lies from the exact gradient in standard errors: along it, and along five random directions."""
    rng = np.random.default_rng(3)
    directions = np.stack([exact, *rng.normal(size=(5, len(exact)))])
    projected = (gradients - exact) @ directions.T
    return np.abs(projected.mean(axis=0)) / (projected.std(axis=0, ddof=1) / np.sqrt(len(projected)))


def test_the_corrected_gradient_is_the_policy_s(folder: Path) -> None:
    """Automatic: within 2 standard errors over 1,152 samples."""
    config = settings(folder)
    assert correction_mode(config, mx.float32)[0] == "sequence_truncate"
    policy = toy(config)
    exact = exact_gradient(policy)
    assert standard_errors_off(estimated_gradients(policy, config), exact).max() < 2


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["none", "token_truncate"])
def test_uncorrected_or_corrected_token_by_token_it_is_another_gradient(folder: Path, mode: str) -> None:
    config = settings(folder, sampling_correction=mode)
    policy = toy(config)
    assert standard_errors_off(estimated_gradients(policy, config), exact_gradient(policy)).max() > 4
