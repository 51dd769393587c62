"""What a model is made of, read from its config.json and the headers of its weights: sizes of layers, bytes of arrays.

No weight is read and no model is built. Where the weights are on this machine every array's bytes are known exactly;
where only config.json is, they follow from its numbers.
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
    """A matrix of one layer: its name within the layer, numbers in and out, how many experts have one like it, and the
    bytes it takes as it comes, its scales included."""

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
    """One model. Sizes are counts of numbers, `weights` is bytes, `width` the bytes of one number of its activations."""

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
    normed: bool
    """Whether queries and keys are normalised, which keeps them once more."""
    plain: bool
    """Whether every layer remembers keys and values of all tokens: only then are prompts read once for their group."""
    layers: tuple[tuple[Linear, ...], ...]
    outside: tuple[Linear, ...]
    """Embedding and output layer; one of them where they are tied."""
    weights: int
    exact: bool
    """Whether `weights` was read from the files, and not worked out from config.json."""
    known: bool
    """Whether the layers are those of a usual transformer; else activations are a rough guess from its matrices."""

    @property
    def queries(self) -> int:
        """Numbers of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token, which are as many as those of its values."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> list[Linear]:
        return [*(linear for layer in self.layers for linear in layer), *self.outside]


def shape_of(folder: Path) -> ModelShape | None:
    """The shape of the model in `folder`; None where there is no config.json that says anything of it."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    return shape_from(cast("dict[str, Any]", found), dict(_headers(folder)))


def shape_from(
    config: Mapping[str, Any], arrays: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
) -> ModelShape | None:
    """The same from what was read: `arrays` maps a weight's name to its type (as safetensors spells it) and shape."""
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
    here = _known_arrays(arrays or {}, packed, tied)
    made = here or _formula(text, count, hidden, heads, head_dim, width, packed, tied)
    kinds = {name for layer in made.layers for linear in layer for name in [linear.name]}
    return ModelShape(
        kind=str(config.get("model_type") or ""), hidden=hidden, heads=heads,
        kv_heads=_number(text, "num_key_value_heads", "n_head_kv") or heads, head_dim=head_dim,
        vocabulary=_number(text, "vocab_size"), tied=tied,
        experts_per_token=_number(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk"),
        width=made.width or width, quantised=bool(packed), normed=made.normed, plain=_is_plain(text, heads),
        layers=made.layers, outside=made.outside, weights=made.bytes, exact=here is not None,
        known=bool(heads) and any("down_proj" in name for name in kinds) and any("o_proj" in name for name in kinds),
    )  # fmt: skip


def _is_plain(text: Mapping[str, Any], heads: int) -> bool:
    windowed = text.get("sliding_window") and text.get("use_sliding_window", True)
    return (bool(heads) and not windowed and "layer_types" not in text) or _all_full(text)


def _all_full(text: Mapping[str, Any]) -> bool:
    types = text.get("layer_types")
    return isinstance(types, list) and set(cast("list[Any]", types)) == {"full_attention"}


@dataclass(frozen=True, slots=True)
class _Made:
    layers: tuple[tuple[Linear, ...], ...]
    outside: tuple[Linear, ...]
    bytes: int
    width: int
    normed: bool


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


def _known_arrays(
    arrays: Mapping[str, tuple[str, tuple[int, ...]]], packed: Mapping[str, Any], tied: bool
) -> _Made | None:
    if not arrays:
        return None
    sizes = {name: _size(*about) for name, about in arrays.items() if not (tied and name.endswith("lm_head.weight"))}
    layers: dict[int, dict[str, Linear]] = {}
    outside: list[Linear] = []
    for name in sizes:
        linear = _linear(name, arrays, sizes, packed)
        if linear is None:
            continue
        place = _LAYER.search(name)
        if place is None:
            if name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
                outside.append(linear)
            continue
        layer = layers.setdefault(int(place[1]), {})
        layer[linear.name] = _stacked(layer.get(linear.name), linear)
    floats = [_BYTES[kind] for kind, _ in arrays.values() if kind in ("F32", "F16", "BF16")]
    return _Made(
        layers=tuple(tuple(layers[i].values()) for i in sorted(layers)),
        outside=tuple(outside),
        bytes=sum(sizes.values()),
        width=max(set(floats), key=floats.count, default=0),
        normed=any(name.endswith(("q_norm.weight", "q_layernorm.weight")) for name in sizes),
    )


def _linear(
    name: str, arrays: Mapping[str, tuple[str, tuple[int, ...]]], sizes: Mapping[str, int], packed: Mapping[str, Any]
) -> Linear | None:
    """The matrix that an array is; None for a vector. One of experts stacked together counts them."""
    kind, shape = arrays[name]
    if not name.endswith(".weight") or len(shape) < 2:
        return None
    stem = name.removesuffix(".weight")
    beside = [stem + end for end in (".scales", ".biases") if stem + end in sizes]
    inputs = shape[-1]
    if beside and kind == "U32":
        inputs = inputs * 32 // int(_mapping(packed.get(stem)).get("bits") or packed.get("bits") or 4)
    place = _LAYER.search(name)
    called = _EXPERT.sub("switch_mlp.", place[2]) if place else stem
    experts = shape[0] if len(shape) > 2 else 1
    return Linear(called, inputs, shape[-2], experts, sizes[name] + sum(sizes[one] for one in beside))


def _stacked(before: Linear | None, one: Linear) -> Linear:
    """mlx-lm puts experts that come one by one into one array."""
    if before is None:
        return one
    return Linear(one.name, one.inputs, one.outputs, before.experts + one.experts, before.bytes + one.bytes)


def _size(kind: str, shape: tuple[int, ...]) -> int:
    size = _BYTES.get(kind, 2)
    for length in shape:
        size *= length
    return size


# ── from config.json alone ───────────────────────────────────────────────────────────────────────────────────────────


def _formula(
    text: Mapping[str, Any],
    count: int,
    hidden: int,
    heads: int,
    head_dim: int,
    width: int,
    packed: Mapping[str, Any],
    tied: bool,
) -> _Made:
    """The usual decoder layer: four projections of attention, a gated unit or several as experts."""
    each = _packed_width(packed, width)
    queries, keys = heads * head_dim, (_number(text, "num_key_value_heads") or heads) * head_dim
    sizes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    attention = [_made_up(name, *size, 1, each) for name, size in zip(_ATTENTION, sizes, strict=True)]
    experts = _number(text, "num_experts", "num_local_experts", "n_routed_experts")
    inner = _number(text, "moe_intermediate_size") if experts else 0
    inner = inner or _number(text, "intermediate_size", "n_inner") or 4 * hidden
    unit = [
        _made_up(f"{'switch_mlp' if experts else 'mlp'}.{name}", *size, max(experts, 1), each)
        for name, size in zip(_GATED, [(hidden, inner), (hidden, inner), (inner, hidden)], strict=True)
    ]
    layer = (*attention, *unit)
    table = _made_up("embed_tokens", hidden, _number(text, "vocab_size"), 1, each)
    outside = (table,) if tied else (table, table)
    total = count * sum(one.bytes for one in layer) + sum(one.bytes for one in outside)
    normed = str(text.get("model_type", "")).startswith(("qwen3", "gemma3", "olmo2"))
    return _Made((layer,) * count, outside, total, width, normed)


def _made_up(name: str, inputs: int, outputs: int, experts: int, each: float) -> Linear:
    return Linear(name, inputs, outputs, experts, round(inputs * outputs * experts * each))


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
