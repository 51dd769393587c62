"""NEFTune: noise on the input embeddings belongs to a row of a rollout, whatever batch the row is in, and to learning
alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import Config, parse
from backend.engine.embedding_noise import EmbeddingNoise, input_embedding
from backend.models.loading import load_model
from backend.models.policy import load_policy
from backend.training.batch import pack
from backend.training.grpo import grpo_learner
from tests.support import random_models
from tests.support.reference_forward import sampled_groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.tiny_model(tmp_path_factory.mktemp("models") / "qwen3")


def config_of(folder: Path, **settings: Any) -> Config:
    plain = {"optimizer": "sgd", "learning_rate": 1e-2, "max_grad_norm": 0, "beta": 0.0, "num_layers": -1}
    return parse({"model": str(folder), "data": "none", "neftune_noise_alpha": 5.0} | plain | settings)


def learned(config: Config, *, updates: int = 0, **memory: Any) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """(the adapters after one step, its metrics); `updates`: those before it."""
    policy = load_policy(config)
    learner = grpo_learner(policy, config, 4, **memory)
    learner.updates = updates
    metrics = learner.learn(pack(sampled_groups(policy.model), pad_id=0))
    return {name: np.array(x) for name, x in policy.trainable().items()}, metrics


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(x, b[name]) for name, x in a.items())


def test_noise_is_repeated_by_a_resume_and_changes_with_seed_and_rollout(folder: Path) -> None:
    config = config_of(folder)
    weights, _ = learned(config, updates=3)
    assert same(weights, learned(config, updates=3)[0])
    others = [learned(config, updates=4)[0], learned(config_of(folder, neftune_noise_alpha=0.0), updates=3)[0]]
    assert not any(same(weights, other) for other in others)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 1, "steps_per_generation": 2}], ids=["one", "two"])
def test_the_ratio_is_1_at_the_first_update(folder: Path, settings: dict[str, Any]) -> None:
    """Of noise that only one of its two passes had, an epsilon of 1e-4 would clip half of the tokens."""
    _, metrics = learned(config_of(folder, epsilon=1e-4, learning_rate=1e-12, **settings))
    assert metrics["clip_ratio_total"] == 0.0


def test_a_row_has_the_noise_of_its_own_length_and_number(folder: Path) -> None:
    model = load_model(str(folder), "model")[0]
    noise = EmbeddingNoise(input_embedding(model), 5.0, seed=1, rollout=2)
    tokens, clean = mx.array([[5, 6, 7, 8], [5, 6, 0, 0]]), noise.embedding(mx.array([[5, 6, 7, 8], [5, 6, 0, 0]]))
    with noise.on([7, 9], [4, 2]):
        added = np.array(noise.embedding(tokens) - clean)
    with noise.on([9], [2]):
        alone = np.array(noise.embedding(tokens[1:, :3]) - clean[1:, :3])
    np.testing.assert_allclose(alone[0], added[1, :3], atol=1e-6)
    assert not added[1, 2:].any() and np.abs(added[0, :2] - added[1, :2]).min() > 0
    for row, length in ((0, 4), (1, 2)):
        bound = 5.0 / np.sqrt(length * clean.shape[-1])
        assert 0.9 * bound < np.abs(added[row, :length]).max() <= bound * 1.0001
    assert mx.array_equal(noise.embedding(tokens), clean)  # outside there is none


@pytest.mark.parametrize(("arch", "keys"), [("qwen3", ["embed_tokens"]), ("gemma3_text", []), ("phi3", [])], ids=str)
def test_the_embedding_is_found_by_a_pass_and_may_have_an_adapter(tmp_path: Path, arch: str, keys: list[str]) -> None:
    model: Any = load_policy(config_of(random_models.tiny_model(tmp_path / arch, arch), lora_keys=keys)).model
    assert input_embedding(model) is model.model.embed_tokens and hasattr(model.model.embed_tokens, "lora_a") == bool(
        keys
    )
