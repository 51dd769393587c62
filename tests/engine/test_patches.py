"""The patches of mlx-lm: what they replace, that uninstall restores it, and that no number changes."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from backend.engine import cpu, model_probe, patches
from backend.engine.forward import SequenceRows, completion_logps, sequence_rows
from backend.engine.gradient_checkpointing import gradient_checkpointing
from backend.engine.model_probe import split
from backend.training.batch import pack
from tests.support import random_models, reference_forward

pytestmark = pytest.mark.usefixtures("patched_as_before")

ARCHES = ["qwen3", "llama", "qwen3_moe", "mixtral", "gemma3_text"]


def folder_of(models: Path, arch: str) -> Path:
    return models / arch if (models / arch).exists() else random_models.tiny_model(models / arch, arch)


def model_of(models: Path, arch: str = "qwen3") -> nn.Module:
    return load_model(folder_of(models, arch))[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of each of our functions, as on x86, with swiglu's minimum size set to 0."""
    counted: Counter[str] = Counter()

    def spied(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: counted.update([name]) or real(*args)

    monkeypatch.setattr(patches, "blocked_attention", spied("blocked_attention", patches.blocked_attention))
    monkeypatch.setattr(patches, "cached_attention", spied("cached_attention", patches.cached_attention))
    monkeypatch.setattr(cpu, "swiglu", spied("swiglu", cpu.swiglu))
    monkeypatch.setattr(patches, "exp_is_scalar", lambda: True)
    monkeypatch.setattr(patches, "MIN_SWIGLU", 1)
    return counted


def without_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's own functions in every model, until the test ends."""
    patches.uninstall()
    monkeypatch.setattr(model_probe, "install", lambda model: None)


def batch_of(model: nn.Module) -> SequenceRows:
    """Completions of unequal lengths after prompts of unequal lengths."""
    batch = pack(reference_forward.sampled_groups(model), pad_id=0)
    return sequence_rows(batch.tokens_BL, batch.prompt_length_B, batch.group_B, batch.completion_BT, batch.mask_BT)


def logps_and_gradients(model: nn.Module) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Log-probabilities, and the gradient of a loss in which each has its own weight."""
    split_model, rows = split(model), batch_of(model)
    weight_BT = mx.array(np.random.default_rng(1).normal(size=rows.completion_BT.shape), mx.float32)

    def loss() -> tuple[mx.array, mx.array]:
        logp_BT = completion_logps(split_model, rows, 0.8)[0]
        return (weight_BT * logp_BT).sum(), logp_BT

    (_, logp_BT), grads = nn.value_and_grad(model, loss)()
    return np.array(logp_BT), {name: np.array(grad) for name, grad in tree_flatten(grads)}


def everything_of_mlx_lm() -> dict[tuple[str, str], Any]:
    """Every attribute of every module of mlx-lm that is loaded, and of every class in them."""
    attributes: dict[tuple[str, str], Any] = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != "mlx_lm" or module is None:
            continue
        attributes |= {(name, key): value for key, value in vars(module).items()}
        for kind in [value for value in vars(module).values() if isinstance(value, type)]:
            attributes |= {(f"{name}.{kind.__qualname__}", key): value for key, value in vars(kind).items()}
    return attributes


@pytest.mark.usefixtures("as_on_a_cpu")  # a GPU's gathers replace nn.Embedding, which is mlx's: see test_gathers.py
def test_after_uninstall_mlx_lm_is_untouched(models: Path) -> None:
    """Models of several families are patched, some of them twice, and one during gradient checkpointing."""
    patches.uninstall()
    trees = [model_of(models, arch) for arch in ARCHES]
    before, of_layers = everything_of_mlx_lm(), (nn.RoPE.__call__, nn.RMSNorm.__call__)
    for model in [*trees, trees[0]]:
        patches.install(model)
    with gradient_checkpointing(trees[0], True):
        names = patches.active()
        changed = {
            f"{owner}.{key}" for (owner, key), x in everything_of_mlx_lm().items() if before[owner, key] is not x
        }
        of_mlx = {f"mlx.nn.layers.{name}.__call__" for name in ("positional_encoding.RoPE", "normalization.RMSNorm")}
        assert changed | of_mlx == set(names)
        assert len(names) == len(set(names))
        assert {"mlx_lm.models.qwen3.swiglu", "mlx_lm.models.qwen3.TransformerBlock.__call__"} <= changed
        patches.uninstall()
        assert patches.active() == []
    after = everything_of_mlx_lm()
    assert after.keys() == before.keys()
    assert not [name for name, value in after.items() if value is not before[name]]
    assert (nn.RoPE.__call__, nn.RMSNorm.__call__) == of_layers


@pytest.mark.parametrize("arch", ARCHES)
def test_what_training_calls(models: Path, calls: Counter[str], arch: str) -> None:
    """Two layers, for prompts and for completions."""
    expected = {"blocked_attention": 4} | ({} if arch == "gemma3_text" else {"swiglu": 4})
    model = model_of(models, arch)
    split_model, rows = split(model), batch_of(model)
    calls.clear()
    mx.eval(completion_logps(split_model, rows, 1.0))
    assert calls == expected


@pytest.mark.parametrize("arch", ARCHES)
def test_patches_change_no_number(models: Path, calls: Counter[str], arch: str, monkeypatch: pytest.MonkeyPatch):
    logps, grads = logps_and_gradients(model_of(models, arch))
    assert calls["blocked_attention"] and (calls["swiglu"] or arch == "gemma3_text")
    without_patches(monkeypatch)
    calls.clear()
    plain_logps, plain = logps_and_gradients(model_of(models, arch))
    assert not calls
    np.testing.assert_allclose(logps, plain_logps, atol=1e-5)
    assert grads.keys() == plain.keys()
    for name, grad in plain.items():
        np.testing.assert_allclose(grads[name], grad, atol=1e-5 * np.abs(grad).max() + 1e-6, rtol=0, err_msg=name)
