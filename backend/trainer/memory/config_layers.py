"""The layers that a config.json describes: what each keeps of earlier tokens, and the sizes of its matrices.

Exact for the usual decoder layers, experts, gated delta nets (Qwen 3 Next, Qwen 3.5) and Gemma 4. Other layers that keep a state
are only told apart from attention: their matrices come from the files, or are taken for those of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

LayerKind = Literal["full", "window", "state"]
"""Keys and values of all tokens, those of a sliding window, or a state of fixed size."""

LARGEST = 2**31
"""More than any size in a config.json: mlx counts in 32 bits."""

Matrix = tuple[str, int, int, int]
"""(name within the layer, input size, output size, experts)."""

_STATE_SIZES = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "mamba_d_ssm",
    "conv_L_cache",
    "linear_num_value_heads",
)
"""Settings of layers with a state. A model that has one, and does not say which layers are which, has none that are surely attention."""


def number(text: Mapping[str, Any], *names: str) -> int:
    """The first of these settings that is a size or a count; 0 where none is, or none that a model can have."""
    values = (text.get(name) for name in names)
    return next((value for value in values if type(value) is int and 0 <= value < LARGEST), 0)


# ── kinds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def layer_kinds(text: Mapping[str, Any], count: int) -> tuple[LayerKind, ...]:
    """The kind of each of `count` layers of the language model with the settings `text`."""
    types, window = text.get("layer_types"), text.get("sliding_window") and text.get("use_sliding_window", True)
    if isinstance(types, list) and len(cast("list[Any]", types)) == count:
        return tuple(_kind(str(name)) for name in cast("list[Any]", types))
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear:  # Kimi Linear counts its layers from 1
        states = cast("Mapping[str, Any]", linear).get("kda_layers")
        states = cast("list[Any]", states) if isinstance(states, list) else []
        return tuple("state" if i + 1 in states else "full" for i in range(count))
    every, others = number(text, "full_attention_interval"), "state"
    if not every and window:
        every, others = number(text, "sliding_window_pattern", "_sliding_window_pattern"), "window"
    if every:  # the last of every few layers attends to all tokens
        return tuple("full" if (i + 1) % every == 0 else cast("LayerKind", others) for i in range(count))
    if not number(text, "num_attention_heads", "n_head", "n_heads") or number(text, *_STATE_SIZES):
        return ("state",) * count
    return ("window" if window else "full",) * count


def _kind(name: str) -> LayerKind:
    if name in ("full_attention", "attention"):
        return "full"
    return "window" if name in ("sliding_attention", "chunked_attention") else "state"


def layers_with_keys(text: Mapping[str, Any], kinds: tuple[LayerKind, ...]) -> int:
    """How many layers, counted from the first, may have keys and values of their own; later ones use those of earlier ones."""
    return len(kinds) - number(text, "num_kv_shared_layers")


# ── matrices ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def layer_matrices(text: Mapping[str, Any], kinds: tuple[LayerKind, ...]) -> list[list[Matrix]]:
    """The matrices of every layer."""
    return [[*_mixer(text, kinds, i), *_per_layer_input(text), *_mlp(text, kinds, i)] for i in range(len(kinds))]


def _mixer(text: Mapping[str, Any], kinds: tuple[LayerKind, ...], index: int) -> list[Matrix]:
    if kinds[index] == "state" and number(text, "linear_num_value_heads"):
        return _gated_delta_net(text)
    hidden, heads = (
        number(text, "hidden_size", "d_model", "n_embd"),
        number(text, "num_attention_heads", "n_head", "n_heads"),
    )
    head_dim = number(text, "head_dim") or (hidden // heads if heads else 0)
    kv_heads = number(text, "num_key_value_heads") or heads
    if kinds[index] == "full":  # Gemma 4 has other heads where it attends to all tokens
        head_dim = number(text, "global_head_dim") or head_dim
        kv_heads = number(text, "num_global_key_value_heads") or kv_heads
    # Qwen 3 Next and 3.5: the query projection gives the gate of the output too.
    gated = 2 if number(text, "linear_num_value_heads") else 1
    queries, keys = heads * head_dim, kv_heads * head_dim
    key_names = ("k_proj",) if text.get("attention_k_eq_v") and kinds[index] == "full" else ("k_proj", "v_proj")
    own_keys = (
        [(f"self_attn.{name}", hidden, keys, 1) for name in key_names] if index < layers_with_keys(text, kinds) else []
    )
    return [("self_attn.q_proj", hidden, gated * queries, 1), *own_keys, ("self_attn.o_proj", queries, hidden, 1)]


def _gated_delta_net(text: Mapping[str, Any]) -> list[Matrix]:
    """Projections of queries, keys and values, of the gate, of decay and step size, and of the output (arXiv:2412.06464)."""
    hidden, heads = number(text, "hidden_size"), number(text, "linear_num_value_heads")
    keys = number(text, "linear_num_key_heads") * number(text, "linear_key_head_dim")
    values = heads * number(text, "linear_value_head_dim")
    return [
        ("linear_attn.in_proj_qkv", hidden, 2 * keys + values, 1), ("linear_attn.in_proj_z", hidden, values, 1),
        ("linear_attn.in_proj_b", hidden, heads, 1), ("linear_attn.in_proj_a", hidden, heads, 1),
        ("linear_attn.out_proj", values, hidden, 1),
    ]  # fmt: skip


def _per_layer_input(text: Mapping[str, Any]) -> list[Matrix]:
    """Gemma 3n and 4: a gate and a projection of the embedding that a token has for each layer."""
    hidden, width = number(text, "hidden_size"), number(text, "hidden_size_per_layer_input")
    return [("per_layer_input_gate", hidden, width, 1), ("per_layer_projection", width, hidden, 1)] if width else []


def _mlp(text: Mapping[str, Any], kinds: tuple[LayerKind, ...], index: int) -> list[Matrix]:
    hidden = number(text, "hidden_size", "d_model", "n_embd")
    inner = number(text, "intermediate_size", "n_inner")
    experts = number(text, "num_experts", "num_local_experts", "n_routed_experts")
    if not experts:
        # Gemma 4's layers without keys of their own have an MLP of twice the size, unless the config says otherwise.
        is_gemma_4 = str(text.get("model_type") or "").startswith("gemma4")
        is_wide = is_gemma_4 and text.get("use_double_wide_mlp", True) and index >= layers_with_keys(text, kinds)
        wide = 2 if is_wide else 1
        return _gated("mlp", hidden, wide * (inner or 4 * hidden))
    routed = _gated("mlp.switch_mlp", hidden, number(text, "moe_intermediate_size") or inner or 4 * hidden, experts)
    if text.get("enable_moe_block"):  # Gemma 4: experts beside a dense MLP
        return [*_gated("mlp", hidden, inner), *routed]
    shared = number(text, "shared_expert_intermediate_size")
    return [*routed, *(_gated("mlp.shared_expert", hidden, shared) if shared else [])]


def _gated(name: str, hidden: int, inner: int, experts: int = 1) -> list[Matrix]:
    sizes = [("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden)]
    return [(f"{name}.{part}", inputs, outputs, experts) for part, inputs, outputs in sizes]
