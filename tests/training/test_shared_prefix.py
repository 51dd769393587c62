"""Prompts that do not fit with their completions are prefilled once for all micro-batches; the gradient stays the
same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.config.config import Config, parse
from backend.models.policy import load_policy
from backend.training.batch import pack
from backend.training.grpo import grpo_learner
from backend.types import Completion, Group, Problem
from tests.support import random_models

G, PROMPT, COMPLETION = 4, 40, 8
MANY = {"gradient_accumulation_steps": 3}
BUDGET = G * COMPLETION
"""Tokens of a problem's completions without their prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}  # not 1, to which any number would broadcast
    return random_models.tiny_model(tmp_path_factory.mktemp("models") / "qwen3", own=heads)


def config_of(model: Path, **settings: Any) -> Config:
    raw = {"model": str(model), "data": "none", "num_layers": -1, "rank": 4, "beta": 0, "learning_rate": 1.0}
    raw |= {"batch_size": 1, "group_size": G, "max_completion_length": COMPLETION}
    raw |= {"optimizer": "sgd", "max_grad_norm": 0}
    return parse(raw | settings)


def groups(*prompts: int) -> list[Group]:
    """One group for each prompt length; completions of unequal lengths, the first of the maximum length."""
    rng = np.random.default_rng(0)
    groups_ = []
    for number, length in enumerate(prompts):
        lengths = [COMPLETION, *rng.integers(2, COMPLETION + 1, G - 1).tolist()]
        completions = [
            Completion(rng.integers(3, 320, n).tolist(), [0.0] * n, "", "eos", advantage=float(rng.normal()))
            for n in lengths
        ]
        groups_.append(Group(Problem(number, "", [], rng.integers(3, 320, length).tolist(), ""), completions))
    return groups_


Reads = list[tuple[type, int]]


def learned(config: Config, batch: list[Group], **how: Any) -> tuple[dict[str, np.ndarray], dict[str, float], Reads]:
    """The changes of the weights by a step of plain gradient descent, its metrics, and what was read: whether prompts
    or completions, and how many tokens."""
    policy = load_policy(config)
    start = {name: np.array(x) for name, x in policy.trainable().items()}
    split_model = policy.split_model
    plain, reads = split_model.hidden, []
    split_model.hidden = lambda tokens, cache=None: reads.append((type(cache[0]), tokens.size)) or plain(tokens, cache)
    learner = grpo_learner(policy, config, 1, **how)
    metrics = learner.learn(pack(batch, pad_id=policy.pad_id))
    return {name: np.array(x) - start[name] for name, x in policy.trainable().items()}, metrics, reads


def assert_same_step(first: tuple[Any, dict[str, float], Reads], second: tuple[Any, dict[str, float], Reads]) -> None:
    assert first[1]["grad_norm"] > 1e-3, "else this shows nothing"
    assert first[1] == pytest.approx(second[1], rel=1e-4, abs=1e-6, nan_ok=True)
    for name, x in first[0].items():
        np.testing.assert_allclose(second[0][name], x, atol=1e-5 * np.abs(x).max() + 1e-7, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("settings", "prompts"),
    [
        ({}, [PROMPT]),
        pytest.param(MANY, [PROMPT, 3, 57], marks=pytest.mark.proof),
        (MANY | {"train_type": "full"}, [PROMPT, 57, 4]),
        (MANY | {"grad_checkpoint": True, "beta": 0.1}, [PROMPT, 57, 4]),
    ],
    ids=["one prompt", "several", "full", "recomputed"],
)
def test_prefilling_prompts_once_changes_no_gradient(model: Path, settings: dict[str, Any], prompts: list[int]) -> None:
    config, batch = config_of(model, **settings), groups(*prompts)
    unsplit = learned(config, batch, micro_batch_tokens=10**6)
    prefilled = learned(config, batch, micro_batch_tokens=BUDGET)
    assert_same_step(unsplit, prefilled)
