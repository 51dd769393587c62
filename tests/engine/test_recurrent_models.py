"""Models with a recurrent state: with our patches they have mlx-lm's numbers, and on Metal one path for eval and train
mode."""

from __future__ import annotations

import importlib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v41
from mlx_lm.models.cache import make_prompt_cache

from backend.engine import patches
from tests.support.simulated_metal import KernelWithoutGradientError, take_metal_s_paths

pytestmark = pytest.mark.usefixtures("without_compiler")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
# Keys of 32 numbers: mlx-lm takes its kernel for multiples of 32 alone.
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
KIMI = {"linear_attn_config": {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "kda_layers": [1]}}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": SIZES
    | DELTA_NET
    | EXPERTS
    | {"decoder_sparse_step": 1, "mlp_only_layers": [], "partial_rotary_factor": 0.5, "norm_topk_prob": True},
    "qwen3_5": {"text_config": SIZES | DELTA_NET | {"model_type": "qwen3_5"}},
    "qwen3_5_moe": {"text_config": SIZES | DELTA_NET | EXPERTS | {"model_type": "qwen3_5_moe"}},
    "olmo_hybrid": SIZES
    | DELTA_NET
    | {"layer_types": ["linear_attention", "full_attention"], "linear_allow_neg_eigval": True, "attention_bias": False},
    "kimi_linear": SIZES
    | KIMI
    | LATENT
    | {
        "num_experts": 0,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 32,
        "model_max_length": 512,
        "hidden_act": "silu",
        "q_lora_rank": None,
    },
    "kimi_k3": SIZES
    | KIMI
    | LATENT
    | {
        "q_lora_rank": 16,
        "first_k_dense_replace": 2,
        "attn_res_block_size": 1,
        "activation_situ_beta": 1.0,
        "activation_situ_linear_beta": 1.0,
    },
    "bailing_moe_v3": SIZES
    | LATENT
    | {
        "head_dim": 32,
        "q_lora_rank": 16,
        "layer_group_size": 2,
        "first_k_dense_replace": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
"""All that have gated delta nets. Kimi's and Bailing's decays are one a key channel, the others' one a head."""

ALL = [
    pytest.param(family, marks=() if family in ("qwen3_next", "kimi_linear") else pytest.mark.proof)
    for family in FAMILIES
]
"""CI takes one family with each kind of decay; `make proofs` takes all."""


@pytest.fixture(autouse=True)
def unpatched(patched_as_before: None) -> None:
    patches.uninstall()


def model_of(family: str, config: dict[str, Any] | None = None) -> nn.Module:
    file = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(0)
    model = file.Model(file.ModelArgs.from_dict({"model_type": family} | (config or FAMILIES[family])))
    mx.eval(model.parameters())
    return model


TOKENS = mx.array(np.random.default_rng(0).integers(1, 64, (2, 70)))


def logps(model: nn.Module) -> mx.array:
    """log π [B, T] of each next token, from one pass over whole rows."""
    logits = model(TOKENS[:, :-1])
    return mx.take_along_axis(nn.log_softmax(logits, axis=-1), TOKENS[:, 1:, None], axis=-1)[..., 0]


def eval_and_train(model: nn.Module) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Log-probabilities in eval mode without a gradient, as old and reference ones are computed; those of an update, in
    train mode; and its gradient."""
    weight_BT = mx.array(np.random.default_rng(1).normal(size=(2, 69)), mx.float32)

    def loss() -> tuple[mx.array, mx.array]:
        logp_BT = logps(model)
        return (weight_BT * logp_BT).sum(), logp_BT

    model.eval()
    old_BT = np.array(logps(model))
    model.train()
    (_, logp_BT), grads = nn.value_and_grad(model, loss)()
    return old_BT, np.array(logp_BT), {name: np.array(x) for name, x in tree_flatten(grads)}


@pytest.mark.parametrize("family", ALL)
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


@pytest.mark.parametrize("family", ALL)
def test_a_prompt_in_two_parts_and_then_single_tokens_are_one_pass(family: str) -> None:
    """Prefill takes our rule, decoding mlx-lm's step, and the state goes from one to the other."""
    model = model_of(family)
    patches.install(model)
    model.eval()
    whole, cache = model(TOKENS), make_prompt_cache(model)
    borders = [0, 50, 66, *range(67, 71)]
    parts = [model(TOKENS[:, start:end], cache=cache) for start, end in pairwise(borders)]
    np.testing.assert_allclose(np.array(mx.concatenate(parts, axis=1)), np.array(whole), atol=2e-5)


@pytest.mark.parametrize("family", ALL)
def test_on_metal_old_and_new_log_probabilities_are_equal_to_the_bit(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_decoding_step_is_mlx_lm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token after a state takes the kernel on Metal; one token without a state is a row of training."""
    take_metal_s_paths(monkeypatch)
    rng = np.random.default_rng(0)
    q, k, v, a, b = (mx.array(rng.normal(size=shape), mx.float32) for shape in [(1, 1, 2, 32)] * 3 + [(1, 1, 2)] * 2)
    gate = a, b, mx.zeros(2), mx.zeros(2)
    state = mx.zeros((1, 2, 32, 32))
    ours, step = patches.gated_delta_update(q, k, v, *gate), patches.gated_delta_update(q, k, v, *gate, state)
    np.testing.assert_allclose(np.array(step[0]), 1.01 * np.array(ours[0]), rtol=1e-5)
    np.testing.assert_allclose(np.array(step[1]), np.array(ours[1]), rtol=1e-5)


# ---- kernels that mlx-lm takes in training too -----------------------------------------------------------------

RWKV7 = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "norm_eps": 1e-5,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "a_low_rank_dim": 8,
    "v_low_rank_dim": 8,
    "gate_low_rank_dim": 8,
    "decay_low_rank_dim": 8,
}


def test_rwkv7_learns_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("rwkv7", RWKV7)
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


def test_deepseek_v41_s_hyper_connections_learn_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    args: Any = SimpleNamespace(hc_mult=2, hc_sinkhorn_iters=3, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=8)
    layer = deepseek_v41.HyperConnection(args)
    layer.fn = mx.random.normal(layer.fn.shape)
    streams = mx.random.normal((1, 3, 2, 8))

    def gradient() -> np.ndarray:
        return np.array(mx.grad(lambda x: (mx.arange(2) * layer(x)[2]).sum())(streams))

    expected = gradient()
    take_metal_s_paths(monkeypatch)
    with pytest.raises(KernelWithoutGradientError):
        gradient()
    patches.install(layer)
    np.testing.assert_array_equal(gradient(), expected)
    assert expected.any()
