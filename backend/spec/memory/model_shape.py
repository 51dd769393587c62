"""Layer sizes and bytes of a model, from its config.json and the headers of its safetensors files.

No weight is read and no model is built. Where the weights are on this machine the bytes of every array are exact; where only
config.json is, they are computed from its sizes.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.spec.model_config import quantization_of

_BYTES = {"F64": 8, "F32": 4, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "BOOL": 1}
_NAMED = {"float32": 4, "bfloat16": 2, "float16": 2}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)\.weight$")
_EXPERT = re.compile(r"experts\.\d+\.")
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight matrix of one layer: its name within the layer, input and output size, the number of experts stacked in it (1
    without), and its bytes as stored, quantisation scales included."""

    name: str
    inputs: int
    outputs: int
    experts: int
    bytes: int

    @property
    def numbers(self) -> int:
        return self.inputs * self.outputs * self.experts


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model. Sizes count numbers, `weights` is in bytes, `width` is the bytes per activation."""

    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    experts_per_token: int
    width: int
    quantised: bool
    has_qk_norm: bool
    """Whether queries and keys are normalised, so that autodiff saves them once more."""
    has_full_attention: bool
    """Whether every layer attends to all tokens (no sliding window, no recurrence): only then is a prompt computed once for
    its group."""
    layers: tuple[tuple[Linear, ...], ...]
    outside: tuple[Linear, ...]
    """Embedding and output layer; a single matrix where they are tied."""
    weights: int
    exact: bool
    """Whether `weights` was read from the files rather than computed from config.json."""
    is_transformer: bool
    """Whether the layers are those of a usual transformer; else activations are roughly guessed from the matrices."""

    @property
    def queries(self) -> int:
        """Numbers in the queries of one token: heads × head_dim."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers in the keys of one token, and in its values: kv_heads × head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> list[Linear]:
        return [*(linear for layer in self.layers for linear in layer), *self.outside]


def shape_of(folder: Path) -> ModelShape | None:
    """The shape of the model in `folder`; None without a config.json that has its sizes."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    return shape_from(cast("dict[str, Any]", config), dict(_headers(folder)))


def shape_from(
    config: Mapping[str, Any], arrays: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
) -> ModelShape | None:
    """As `shape_of`, from parsed contents: `arrays` maps a weight's name to its safetensors dtype and shape."""
    text = {**config, **_mapping(config.get("text_config"))}
    hidden, count = (
        _number(text, "hidden_size", "d_model", "n_embd"),
        _number(text, "num_hidden_layers", "n_layer", "n_layers"),
    )
    if not hidden or not count:
        return None
    heads = _number(text, "num_attention_heads", "n_head", "n_heads")
    head_dim = _number(text, "head_dim") or (hidden // heads if heads else 0)
    packed = quantization_of(config)
    width = _NAMED.get(str(text.get("torch_dtype") or text.get("dtype") or "").removeprefix("torch."), 2)
    tied = bool(text.get("tie_word_embeddings", True))
    from_files = _from_arrays(arrays or {}, packed, tied)
    contents = from_files or _from_config(text, count, hidden, heads, head_dim, width, packed, tied)
    kinds = {name for layer in contents.layers for linear in layer for name in [linear.name]}
    return ModelShape(
        kind=str(config.get("model_type") or ""), hidden=hidden, heads=heads,
        kv_heads=_number(text, "num_key_value_heads", "n_head_kv") or heads, head_dim=head_dim,
        vocabulary=_number(text, "vocab_size"), tied=tied,
        experts_per_token=_number(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk"),
        width=contents.width or width, quantised=bool(packed), has_qk_norm=contents.has_qk_norm, has_full_attention=_has_full_attention(text, heads),
        layers=contents.layers, outside=contents.outside, weights=contents.bytes, exact=from_files is not None,
        is_transformer=bool(heads) and any("down_proj" in name for name in kinds) and any("o_proj" in name for name in kinds),
    )  # fmt: skip


def _has_full_attention(text: Mapping[str, Any], heads: int) -> bool:
    windowed = text.get("sliding_window") and text.get("use_sliding_window", True)
    return (bool(heads) and not windowed and "layer_types" not in text) or _all_layers_full(text)


def _all_layers_full(text: Mapping[str, Any]) -> bool:
    types = text.get("layer_types")
    return isinstance(types, list) and set(cast("list[Any]", types)) == {"full_attention"}


@dataclass(frozen=True, slots=True)
class _Contents:
    layers: tuple[tuple[Linear, ...], ...]
    outside: tuple[Linear, ...]
    bytes: int
    width: int
    has_qk_norm: bool


# ── from the files ───────────────────────────────────────────────────────────────────────────────────────────────────


def _headers(folder: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Name, type and shape of every array in the folder's safetensors: eight bytes of length, then JSON."""
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(length))
        except (OSError, ValueError, struct.error):
            continue
        for name, about in header.items():
            if name != "__metadata__":
                yield name, (about["dtype"], tuple(about["shape"]))


def _from_arrays(
    arrays: Mapping[str, tuple[str, tuple[int, ...]]], packed: Mapping[str, Any], tied: bool
) -> _Contents | None:
    if not arrays:
        return None
    sizes = {name: _size(*about) for name, about in arrays.items() if not (tied and name.endswith("lm_head.weight"))}
    layers: dict[int, dict[str, Linear]] = {}
    outside: list[Linear] = []
    for name in sizes:
        linear = _linear(name, arrays, sizes, packed)
        if linear is None:
            continue
        in_layer = _LAYER.search(name)
        if in_layer is None:
            if name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
                outside.append(linear)
            continue
        layer = layers.setdefault(int(in_layer[1]), {})
        layer[linear.name] = _stacked(layer.get(linear.name), linear)
    floats = [_BYTES[kind] for kind, _ in arrays.values() if kind in ("F32", "F16", "BF16")]
    return _Contents(
        layers=tuple(tuple(layers[i].values()) for i in sorted(layers)),
        outside=tuple(outside),
        bytes=sum(sizes.values()),
        width=max(set(floats), key=floats.count, default=0),
        has_qk_norm=any(name.endswith(("q_norm.weight", "q_layernorm.weight")) for name in sizes),
    )


def _linear(
    name: str, arrays: Mapping[str, tuple[str, tuple[int, ...]]], sizes: Mapping[str, int], packed: Mapping[str, Any]
) -> Linear | None:
    """The matrix of an array; None for a vector. Experts stacked in one array [experts, out, in] are counted."""
    kind, shape = arrays[name]
    if not name.endswith(".weight") or len(shape) < 2:
        return None
    stem = name.removesuffix(".weight")
    packing = [stem + end for end in (".scales", ".biases") if stem + end in sizes]
    inputs = shape[-1]
    if packing and kind == "U32":  # several quantised numbers in each 32-bit word
        inputs = inputs * 32 // int(_mapping(packed.get(stem)).get("bits") or packed.get("bits") or 4)
    in_layer = _LAYER.search(name)
    short_name = _EXPERT.sub("switch_mlp.", in_layer[2]) if in_layer else stem
    experts = shape[0] if len(shape) > 2 else 1
    return Linear(short_name, inputs, shape[-2], experts, sizes[name] + sum(sizes[part] for part in packing))


def _stacked(before: Linear | None, expert: Linear) -> Linear:
    """Add an expert stored by itself to the others of its kind: mlx-lm stacks them when it loads."""
    if before is None:
        return expert
    experts, size = before.experts + expert.experts, before.bytes + expert.bytes
    return Linear(expert.name, expert.inputs, expert.outputs, experts, size)


def _size(kind: str, shape: tuple[int, ...]) -> int:
    size = _BYTES.get(kind, 2)
    for length in shape:
        size *= length
    return size


# ── from config.json alone ───────────────────────────────────────────────────────────────────────────────────────────


def _from_config(
    text: Mapping[str, Any],
    count: int,
    hidden: int,
    heads: int,
    head_dim: int,
    width: int,
    packed: Mapping[str, Any],
    tied: bool,
) -> _Contents:
    """The usual decoder layers: four attention projections and a gated MLP, or several as experts."""
    bytes_per_number = _packed_width(packed, width)
    queries, keys = heads * head_dim, (_number(text, "num_key_value_heads") or heads) * head_dim
    sizes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    attention = [
        _linear_from_config(name, *size, 1, bytes_per_number) for name, size in zip(_ATTENTION, sizes, strict=True)
    ]
    experts = _number(text, "num_experts", "num_local_experts", "n_routed_experts")
    inner = _number(text, "moe_intermediate_size") if experts else 0
    inner = inner or _number(text, "intermediate_size", "n_inner") or 4 * hidden
    mlp = [
        _linear_from_config(f"{'switch_mlp' if experts else 'mlp'}.{name}", *size, max(experts, 1), bytes_per_number)
        for name, size in zip(_GATED, [(hidden, inner), (hidden, inner), (inner, hidden)], strict=True)
    ]
    layer = (*attention, *mlp)
    table = _linear_from_config("embed_tokens", hidden, _number(text, "vocab_size"), 1, bytes_per_number)
    outside = (table,) if tied else (table, table)
    total = count * sum(linear.bytes for linear in layer) + sum(linear.bytes for linear in outside)
    has_qk_norm = str(text.get("model_type", "")).startswith(("qwen3", "gemma3", "olmo2"))
    return _Contents((layer,) * count, outside, total, width, has_qk_norm)


def _linear_from_config(name: str, inputs: int, outputs: int, experts: int, bytes_per_number: float) -> Linear:
    return Linear(name, inputs, outputs, experts, round(inputs * outputs * experts * bytes_per_number))


def _packed_width(packed: Mapping[str, Any], width: int) -> float:
    """Bytes of one number, its share of the group's scale and bias included."""
    bits, group = packed.get("bits"), packed.get("group_size") or 64
    return packed_width(int(bits), int(group), str(packed.get("mode") or "affine"), width) if bits else width


def packed_width(bits: int, group: int, mode: str, width: int) -> float:
    """Bytes of one quantised number. Affine groups have a scale and a bias, the floating kinds one byte of scale."""
    return bits / 8 + (2 * width if mode == "affine" else 1) / group


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _number(text: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a number; 0 where none is."""
    return next((int(text[name]) for name in names if isinstance(text.get(name), int)), 0)
