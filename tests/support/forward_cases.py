"""Batches for the forward pass, and their log-probabilities by definition: each row alone, plain autodiff."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from backend.config.config import parse
from backend.engine.forward import completion_logps, sequence_rows
from backend.engine.output_layer import SplitModel
from backend.models.policy import Policy, load_policy
from tests.support import random_models


@dataclass(frozen=True)
class Layout:
    """Tokens of each prompt; the prompt of each row; tokens of each row's completion."""

    prompts: list[int]
    prompt_of: list[int]
    completions: list[int]


UNEVEN = Layout([3, 7, 1], [0, 0, 1, 2, 2], [6, 2, 9, 1, 4])
EVEN = Layout([5, 5], [0, 0, 1, 1], [6, 2, 9, 1])
LAYOUTS = {
    "uneven": UNEVEN,
    "even": EVEN,
    "even and ragged": Layout([5, 2], [0, 0, 1, 1], [6, 2, 9, 1]),
    "one row": Layout([4], [0], [5]),
    "one token": Layout([4, 2], [0, 0, 1], [1] * 3),
    "prompts of one token": Layout([1, 1], [0, 1, 1], [3, 1, 2]),
}


class Case:
    """A batch padded on the right, as `completion_logps` takes it."""

    def __init__(self, layout: Layout = UNEVEN, pad: int = 0) -> None:
        rng = np.random.default_rng(0)
        self.layout = layout
        shared = [rng.integers(3, 320, n).tolist() for n in layout.prompts]
        self.prompts = [shared[p] for p in layout.prompt_of]
        self.completions = [rng.integers(3, 320, n).tolist() for n in layout.completions]
        both = [p + c for p, c in zip(self.prompts, self.completions, strict=True)]
        L, self.T = max(map(len, both)), max(layout.completions)
        self.tokens_BL = mx.array([row + [pad] * (L - len(row)) for row in both])
        self.completion_BT = mx.array([row + [pad] * (self.T - len(row)) for row in self.completions])
        self.mask_BT = np.array([[t < n for t in range(self.T)] for n in layout.completions])
        lengths, groups = mx.array([len(p) for p in self.prompts]), mx.array(layout.prompt_of) * 3 + 2
        self.rows = sequence_rows(self.tokens_BL, lengths, groups, self.completion_BT, mx.array(self.mask_BT))

    def logps(
        self, split_model: SplitModel, temperature: float = 1.0, chunk: int | None = None, **options: Any
    ) -> tuple[mx.array, ...]:
        return completion_logps(split_model, self.rows, temperature, chunk, **options).arrays

    def plain(self, model: nn.Module, temperature: float) -> tuple[mx.array, mx.array]:
        """The same by the definition: each row alone, the full vocabulary, log-softmax, gather; padded with 0."""
        logps, entropies = [], []
        for prompt, completion in zip(self.prompts, self.completions, strict=True):
            logits = model(mx.array([prompt + completion]))[0, len(prompt) - 1 : -1].astype(mx.float32) / temperature
            all_logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            padding = [(0, self.T - len(completion))]
            logps.append(mx.pad(all_logps[mx.arange(len(completion)), mx.array(completion)], padding))
            entropies.append(mx.pad(-(mx.exp(all_logps) * all_logps).sum(-1), padding))
        return mx.stack(logps), mx.stack(entropies)


def model_of(models: Path, arch: str = "qwen3", **options: Any) -> nn.Module:
    """A fresh copy of the same random model at every call, so that a test may change it."""
    folder = models / "-".join([arch, *(f"{key}={value}" for key, value in options.items())])
    if not folder.exists():
        random_models.tiny_model(folder, arch, **options)
    return load_model(folder)[0]


def lora_policy(models: Path, dropout: float = 0.0) -> Policy:
    """qwen3 with LoRA everywhere, whose B is random: a fresh B is 0, which would hide errors in A's gradient."""
    model_of(models)
    settings = {"model": str(models / "qwen3"), "data": "none", "beta": 0, "num_layers": -1, "dropout": dropout}
    policy = load_policy(parse(settings))
    mx.random.seed(5)
    for layer in policy.model.layers:
        for name, module in layer.named_modules():
            if name.endswith("_proj"):
                module.lora_b = 0.05 * mx.random.normal(module.lora_b.shape)
    return policy


def gradients(model: nn.Module, logps: Callable[[], mx.array]) -> tuple[float, dict[str, np.ndarray]]:
    """A loss that weighs every token differently, and its gradient in every trainable array."""

    def loss() -> mx.array:
        logp_BT = logps()
        return (mx.array(np.random.default_rng(1).normal(size=logp_BT.shape), mx.float32) * logp_BT).sum()

    value, grads = nn.value_and_grad(model, loss)()
    return value.item(), {name: np.array(grad) for name, grad in tree_flatten(grads)}


def assert_same_gradients(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 1e-5, floor: float = 1e-6
) -> None:
    """Differences are measured against the largest entry of each array: single entries may be nearly 0."""
    assert actual.keys() == expected.keys()
    assert any(np.abs(grad).max() > 1e-2 for grad in expected.values())
    for name, grad in expected.items():
        np.testing.assert_allclose(actual[name], grad, atol=rtol * np.abs(grad).max() + floor, rtol=0, err_msg=name)
