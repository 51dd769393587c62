"""Blocks that decode in fewer kernels give the tokens of the model's own blocks, and are used only where they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import parse
from backend.engine import device, metal
from backend.models.policy import Policy, load_policy
from backend.sampling import fused_linear, fused_model
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import GREEDY
from backend.types import Problem
from backend.utils.machine import TREAT_CPU_AS
from tests.support import metal_shim, random_models

PROBLEMS = [Problem(i, "", [], [5 + 7 * i + j for j in range(n)], "") for i, n in enumerate((1, 30, 70))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")


def policy_of(models: Path, arch: str, **making: Any) -> Policy:
    folder = models / "-".join([arch, *map(str, making.values())])
    if not folder.exists():
        random_models.tiny_model(folder, arch, **making)
    raw = {"model": str(folder), "data": "none", "num_layers": -1, "train_type": "lora", "beta": 0}
    policy = load_policy(parse(raw))
    mx.random.seed(1)
    for module in policy.model.modules():
        if "lora_b" in module:
            module.lora_b = 0.05 * mx.random.normal(module.lora_b.shape)
    return policy


def assert_same_completions(policy: Policy, fused: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    got = fused.sample(PROBLEMS, 2, GREEDY, 0, 0)
    monkeypatch.delenv(TREAT_CPU_AS)
    expected = Sampler(policy, 12).sample(PROBLEMS, 2, GREEDY, 0, 0)
    for a, b in zip(got, expected, strict=True):
        for one, other in zip(a.completions, b.completions, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logps, other.logps, atol=1e-4)


@pytest.mark.parametrize(("arch", "bits"), [("qwen3", 4), ("qwen3", None), ("llama", 4), ("qwen2", None)])
def test_same_completions(
    arch: str, bits: int | None, models: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without norms of heads, biases, and merged weights; rows of unequal length, refilled and compacted."""
    policy = policy_of(models, arch, **({"bits": bits} if bits else {}))
    fused = Sampler(policy, 12, rows=4)
    assert fused.fused.packs_cache and fused.slow_paths == []
    assert_same_completions(policy, fused, monkeypatch)


def test_our_kernels_get_what_they_compute(models: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain forms stand for the kernels: the same arguments, so a wrong one would show."""
    calls: list[str] = []

    def adapted(*arguments: Any) -> mx.array:
        calls.append("adapter")
        assert all(array.ndim == 2 for array in arguments if isinstance(array, mx.array))
        return metal_shim.adapted_plain(*arguments)

    def rotated(*arguments: Any) -> tuple[mx.array, mx.array]:
        calls.append("heads")
        return metal.rotated_heads_plain(*arguments)

    monkeypatch.setattr(fused_linear, "adapted", adapted)
    monkeypatch.setattr(fused_model, "rotated_heads", rotated)
    policy = policy_of(models, "qwen3", bits=4)
    fused = Sampler(policy, 12, rows=4)
    assert calls == []  # no Metal here
    fused.use_kernels(True)
    assert_same_completions(policy, fused, monkeypatch)
    assert calls.count("adapter") == 4 * calls.count("heads") > 0


@pytest.mark.parametrize("arch", ["gemma3_text", "phi3", "olmo2"])
def test_other_blocks_keep_their_own_way_without_a_word(arch: str, models: Path, gpu: None) -> None:
    fused = Sampler(policy_of(models, arch), 4).fused
    assert not fused.packs_cache and fused.slow_paths == []


def test_blocks_with_other_logits_are_not_used(models: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(models, "qwen3", bits=4)
    right = fused_model.rotated_heads_plain

    def without_norms(qkv: mx.array, rotation: mx.array, heads: Any, norms: Any) -> tuple[mx.array, mx.array]:
        return right(qkv, rotation, heads, None)

    monkeypatch.setattr(fused_model, "rotated_heads_plain", without_norms)
    fused = Sampler(policy, 12)
    assert not fused.fused.packs_cache
    (sentence,) = fused.slow_paths
    assert sentence == (
        "Decoding steps run more kernels than they need: the fused blocks give other logits than the model."
    )
    assert_same_completions(policy, fused, monkeypatch)


def test_kernels_with_other_logits_are_not_used(models: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac whose compiler or chip disagrees: the fused blocks stay, in plain mlx."""
    monkeypatch.setattr(device, "has_metal", lambda: True)
    monkeypatch.setattr(fused_model, "rotated_heads", metal.rotated_heads_plain)
    monkeypatch.setattr(fused_linear, "adapted", lambda base, *rest: 2 * metal_shim.adapted_plain(base, *rest))
    policy = policy_of(models, "qwen3", bits=4)
    fused = Sampler(policy, 12)
    assert fused.fused.packs_cache and not any(block.uses_kernels for block in fused.fused.decoding_blocks)
    assert fused.slow_paths == [
        "Decoding steps run more kernels than they need: kernels of our own give other logits than the model."
    ]
    assert_same_completions(policy, fused, monkeypatch)
