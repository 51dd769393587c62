"""Models with a recurrent state: mlx-lm's numbers, and on Metal one path for eval and train mode."""

import importlib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v41, gated_delta, kimi_k3, rwkv7
from mlx_lm.models.cache import make_prompt_cache

from backend.engine import patches
from tests.support.architectures.tiny_configs import tiny_config

FILES = (gated_delta, kimi_k3, rwkv7, deepseek_v41)


class KernelWithoutGradientError(AssertionError):
    """A kernel was taken that training cannot differentiate."""


def take_metal_s_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    metal = vars(mx) | {"default_device": lambda: mx.gpu, "metal": SimpleNamespace(is_available=lambda: True)}
    for file in FILES:
        monkeypatch.setattr(file, "mx", SimpleNamespace(**metal))

    def other_numbers(q: mx.array, *arrays: Any) -> tuple[mx.array, mx.array]:
        out, state = gated_delta.gated_delta_ops(q, *arrays)
        return 1.01 * out, state

    def no_gradient(*args: Any, **more: Any) -> None:
        raise KernelWithoutGradientError

    monkeypatch.setattr(gated_delta, "gated_delta_kernel", other_numbers)
    for file, kernel in ((kimi_k3, "_attn_res_kernel"), (deepseek_v41, "_sinkhorn_kernel"), (rwkv7, "_wkv7_kernel")):
        monkeypatch.setattr(file, kernel, no_gradient)


# Keys of 32 numbers: mlx-lm takes its kernel for multiples of 32 alone.
KIMI = {"linear_attn_config": {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1]}}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32},
    "kimi_linear": KIMI | {"num_experts": 0, "first_k_dense_replace": 2},
    "kimi_k3": KIMI | {"first_k_dense_replace": 2, "attn_res_block_size": 1},
}
"""Models with gated delta nets. Kimi's decays are one a key channel, the other's one a head."""


@pytest.fixture(autouse=True)
def unpatched(patched_as_before: None) -> None:
    patches.uninstall()


def model_of(family: str, config: dict[str, Any] | None = None) -> nn.Module:
    file = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(0)
    settings = tiny_config(family) | {"vocab_size": 64}
    own = FAMILIES[family] if config is None else config
    if "text_config" in settings:
        settings["text_config"] |= {"vocab_size": 64} | own
    model = file.Model(file.ModelArgs.from_dict(settings | own))
    mx.eval(model.parameters())
    return model


TOKENS = mx.array(np.random.default_rng(0).integers(1, 64, (2, 70)))


def logps(model: nn.Module) -> mx.array:
    """log π [B, T] of each next token, from one pass over whole rows."""
    logits = model(TOKENS[:, :-1])
    return mx.take_along_axis(nn.log_softmax(logits, axis=-1), TOKENS[:, 1:, None], axis=-1)[..., 0]


def eval_and_train(model: nn.Module) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Log-probabilities in eval mode without a gradient; those of an update, in train mode; and its gradient."""
    weight_BT = mx.array(np.random.default_rng(1).normal(size=(2, 69)), mx.float32)

    def loss() -> tuple[mx.array, mx.array]:
        logp_BT = logps(model)
        return (weight_BT * logp_BT).sum(), logp_BT

    model.eval()
    old_BT = np.array(logps(model))
    model.train()
    (_, logp_BT), grads = nn.value_and_grad(model, loss)()
    return old_BT, np.array(logp_BT), {name: np.array(x) for name, x in tree_flatten(grads)}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_gradients_are_mlx_lm_s(family: str) -> None:
    model = model_of(family)
    plain_old, plain_logps, plain = eval_and_train(model)
    patches.install(model)
    assert any(name.endswith(".gated_delta_update") for name in patches.active())
    old, new, grads = eval_and_train(model)
    np.testing.assert_allclose(old, plain_old, atol=1e-5)
    np.testing.assert_allclose(new, plain_logps, atol=1e-5)
    for name, grad in plain.items():
        np.testing.assert_allclose(grads[name], grad, atol=1e-5 * np.abs(grad).max() + 1e-6, rtol=0, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_two_parts_and_then_single_tokens_are_one_pass(family: str) -> None:
    """Prefill takes our rule, decoding mlx-lm's step, and the state goes from one to the other."""
    model = model_of(family)
    patches.install(model)
    model.eval()
    whole, cache = model(TOKENS), make_prompt_cache(model)
    borders = [0, 50, 66, *range(67, 71)]
    parts = [model(TOKENS[:, start:end], cache=cache) for start, end in pairwise(borders)]
    np.testing.assert_allclose(np.array(mx.concatenate(parts, axis=1)), np.array(whole), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_metal_old_and_new_logps_are_equal_to_the_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    here = eval_and_train(model)[1]
    take_metal_s_paths(monkeypatch)
    if family == "kimi_k3":
        with pytest.raises(KernelWithoutGradientError):
            eval_and_train(model)
    else:
        old, new, _ = eval_and_train(model)
        assert np.abs(old - new).max() > 1e-5, "else the stand-in is never taken, and this shows nothing"
    patches.install(model)
    old, new, _ = eval_and_train(model)
    np.testing.assert_array_equal(old, new)
    np.testing.assert_allclose(new, here, atol=1e-5)


def test_rwkv7_learns_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("rwkv7", {"hidden_size": 64, "head_dim": 32})
    # Its mixing weights start at zero, and with them every key.
    rng = np.random.default_rng(0)
    model.load_weights(
        [(n, mx.array(0.3 * rng.normal(size=x.shape), mx.float32)) for n, x in tree_flatten(model.parameters())]
    )
    _, expected, plain = eval_and_train(model)
    take_metal_s_paths(monkeypatch)
    with pytest.raises(KernelWithoutGradientError):
        eval_and_train(model)
    patches.install(model)
    old, new, grads = eval_and_train(model)
    np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(new, expected)
    for name, grad in plain.items():
        # Not bit for bit: the order of its sums is the processor's.
        np.testing.assert_allclose(grads[name], grad, rtol=1e-5, atol=1e-6, err_msg=name)
