"""Gradient checkpointing changes no gradient, does recompute each layer, and restores the layer class afterwards."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from backend.engine.gradient_checkpointing import gradient_checkpointing
from backend.engine.model_probe import split
from tests.support import random_models
from tests.support.architectures.tiny_configs import tiny_config
from tests.support.forward_cases import Case, assert_same_gradients, gradients, lora_policy, model_of

pytestmark = pytest.mark.usefixtures("without_compiler")


@pytest.mark.parametrize("trained", ["adapters", "everything"])
def test_gradient_checkpointing_changes_no_gradient(models: Path, trained: str) -> None:
    case = Case()
    model = lora_policy(models).model if trained == "adapters" else model_of(models)
    if trained == "everything":
        model.unfreeze()
    split_model = split(model)
    results = []
    for on in (False, True):
        with gradient_checkpointing(model, on):
            results.append(gradients(model, lambda: case.logps(split_model, 0.7, 5)[0]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert_same_gradients(results[1][1], results[0][1], rtol=1e-6)


def test_the_second_pass_samples_the_same_dropout_mask(models: Path) -> None:
    """With another mask the gradient would be another function's: compared with its loss's finite difference."""
    policy, case = lora_policy(models, dropout=0.5), Case()
    policy.model.train()

    def loss_and_gradient() -> tuple[float, dict[str, np.ndarray]]:
        mx.random.seed(11)
        with gradient_checkpointing(policy.model, True):
            return gradients(policy.model, lambda: case.logps(policy.split_model)[0])

    def loss_at(distance: float, direction: dict[str, np.ndarray]) -> float:
        start = policy.trainable()
        policy.assign({name: x + distance * mx.array(direction[name]) for name, x in start.items()})
        loss = loss_and_gradient()[0]
        policy.assign(start)
        return loss

    loss, grads = loss_and_gradient()
    assert loss == loss_and_gradient()[0]
    norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    direction = {name: grad / norm for name, grad in grads.items()}
    difference = (loss_at(1e-3, direction) - loss_at(-1e-3, direction)) / 2e-3
    assert difference == pytest.approx(norm, rel=2e-2)


@pytest.mark.parametrize("arch", ["gemma4_text", "gemma3n"])
def test_layers_that_read_an_earlier_layers_keys_send_their_gradient_there(models: Path, arch: str) -> None:
    """Gemma 4 hands them on as an argument, Gemma 3n in a cache; both have an embedding per layer."""
    folder = random_models.tiny_model(models / arch, arch, own=tiny_config(arch), noise=0.05)
    model, case = load_model(folder)[0], Case()
    split_model, results = split(model), []
    for on in (False, True):
        with gradient_checkpointing(model, on):
            results.append(gradients(model, lambda: case.logps(split_model, 0.7, 5)[0])[1])
    assert_same_gradients(results[1], results[0], rtol=1e-4, floor=1e-5)
    assert np.abs(next(grad for name, grad in results[1].items() if "layers.0.self_attn.k_proj" in name)).max() > 1e-3
