"""Layer sizes and bytes of a model, from its config.json and the headers of its safetensors files.

Where the weights are on this machine the bytes of every array are exact; where only config.json is, they are computed
from its sizes: exact for the usual decoder layers, experts, gated delta nets (Qwen 3 Next, Qwen 3.5) and Gemma 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from backend.models.architectures import quantization_of
from backend.utils import documents
from backend.utils.errors import UserError
from backend.utils.files import read_text
from backend.utils.safetensors import BYTES, BrokenFile, read_header

_NAMED = {"float32": 4, "bfloat16": 2, "float16": 2}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)\.weight$")
_EXPERT = re.compile(r"experts\.\d+\.")
_NOT_LOADED = re.compile(
    r"(?:^|\.)(?:vision_tower|vision_model|vision_embedder|visual|audio_tower|multi_modal_projector|embed_vision"
    r"|embed_audio|mtp)\."
)
"""Weights of images, sound and multi-token prediction, which mlx-lm leaves in the file."""


MOST_LAYERS = 10_000
"""More than any model has; a config.json with more layers describes none."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight matrix of one layer: its name within the layer, input and output size, the number of experts stacked
    in it (1 without), and its bytes as stored, quantisation scales included."""

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
    """True if queries and keys are normalised, so that autodiff saves them once more."""
    kinds: tuple[LayerKind, ...]
    """What each layer keeps of earlier tokens."""
    window: int
    """Tokens of the layers with a sliding window."""
    layers_with_keys: int
    """The number of layers, from the first, with keys and values of their own."""
    layers: tuple[tuple[Linear, ...], ...]
    outside: tuple[Linear, ...]
    """Embedding and output layer; a single matrix where they are tied."""
    weights: int
    exact: bool
    """True if `weights` was read from the files rather than computed from config.json."""

    @property
    def is_transformer(self) -> bool:
        """True if all layers are those of a usual transformer; of others activations are roughly guessed from the
        matrices."""
        return bool(self.heads) and all(is_usual(layer) for layer in self.layers)

    @property
    def has_full_attention(self) -> bool:
        """True if every layer attends to all tokens (no sliding window, no recurrence): only then is a prompt
        computed once for its group."""
        return bool(self.heads) and all(kind == "full" for kind in self.kinds)

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

    def cached_numbers(self, columns: int) -> int:
        """Numbers that one row's caches hold of `columns` tokens: keys and values by layer, in a window at most its
        tokens. States, whose size does not grow, are left out."""
        held = {"full": columns, "window": min(columns, self.window or columns), "state": 0}
        own = zip(self.kinds[: self.layers_with_keys], self.layers, strict=False)
        # Where config.json does not say which layers are attention (Jamba), or all of them keep both (Falcon-H1), the
        # names say it.
        by_name = "full" not in self.kinds and "window" not in self.kinds
        return sum(
            2 * self._keys_of(layer) * (columns if by_name and _has_keys(layer) else held[kind]) for kind, layer in own
        )

    def _keys_of(self, layer: tuple[Linear, ...]) -> int:
        """Numbers in one token's keys in a layer: Gemma 4's layers differ."""
        return next((linear.outputs for linear in layer if linear.name.endswith("self_attn.k_proj")), self.keys)


def shape_of(folder: Path) -> ModelShape | None:
    """The shape of the model in `folder`; None without a config.json that has its sizes."""
    try:
        config = documents.parse_loose_json(read_text(folder / "config.json", "model"))
    except (UserError, documents.BrokenJson):  # whoever opens the model says so
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
        number(text, "hidden_size", "d_model", "n_embd"),
        number(text, "num_hidden_layers", "n_layer", "n_layers"),
    )
    if not hidden or not 0 < count <= MOST_LAYERS:
        return None
    heads = number(text, "num_attention_heads", "n_head", "n_heads")
    head_dim = number(text, "head_dim") or (hidden // heads if heads else 0)
    packed = quantization_of(config)
    width = _NAMED.get(str(text.get("torch_dtype") or text.get("dtype") or "").removeprefix("torch."), 2)
    tied = bool(text.get("tie_word_embeddings", True))
    from_files = _from_arrays(arrays or {}, packed, tied)
    kinds = layer_kinds(text, count)
    contents = from_files or _from_config(text, kinds, hidden, width, packed, tied)
    return ModelShape(
        kind=str(config.get("model_type") or ""),
        hidden=hidden,
        heads=heads,
        kv_heads=number(text, "num_key_value_heads", "n_head_kv") or heads,
        head_dim=head_dim,
        vocabulary=number(text, "vocab_size"),
        tied=tied,
        experts_per_token=number(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk"),
        width=contents.width or width,
        quantised=bool(packed),
        has_qk_norm=contents.has_qk_norm,
        kinds=_as_many(kinds, len(contents.layers)),
        window=number(text, "sliding_window"),
        layers_with_keys=layers_with_keys(text, kinds),
        layers=contents.layers,
        outside=contents.outside,
        weights=contents.bytes,
        exact=from_files is not None,
    )


def is_usual(layer: tuple[Linear, ...]) -> bool:
    """True if a layer is attention and a gated MLP, of which it is counted what autodiff saves."""
    return all(any(linear.name.endswith(end) for linear in layer) for end in ("o_proj", "down_proj"))


def _has_keys(layer: tuple[Linear, ...]) -> bool:
    return any(linear.name.endswith("k_proj") for linear in layer)


def _as_many(kinds: tuple[LayerKind, ...], count: int) -> tuple[LayerKind, ...]:
    """The kinds of `count` layers, where the files have others than config.json counts, such as those that predict
    further tokens."""
    return (kinds + kinds[-1:] * count)[:count]


@dataclass(frozen=True, slots=True)
class _Contents:
    layers: tuple[tuple[Linear, ...], ...]
    outside: tuple[Linear, ...]
    bytes: int
    width: int
    has_qk_norm: bool


def _headers(folder: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Name, type and shape of every array in the folder's safetensors; broken files are left out."""
    for file in sorted(folder.glob("model*.safetensors")):
        with suppress(BrokenFile):
            yield from ((name, (array.dtype, array.shape)) for name, array in read_header(file).items())


def _from_arrays(
    arrays: Mapping[str, tuple[str, tuple[int, ...]]], packed: Mapping[str, Any], tied: bool
) -> _Contents | None:
    if not arrays:
        return None
    arrays = {name: about for name, about in arrays.items() if not _NOT_LOADED.search(name)}
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
    floats = [BYTES[kind] for kind, _ in arrays.values() if kind in ("F32", "F16", "BF16")]
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
        inputs = inputs * 32 // (number(_mapping(packed.get(stem)), "bits") or number(packed, "bits") or 4)
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
    size = BYTES.get(kind, 2)
    for length in shape:
        size *= length
    return size


def _from_config(
    text: Mapping[str, Any],
    kinds: tuple[LayerKind, ...],
    hidden: int,
    width: int,
    packed: Mapping[str, Any],
    tied: bool,
) -> _Contents:
    bytes_per_number = _packed_width(packed, width)
    layers = tuple(
        tuple(_linear_from_config(*matrix, bytes_per_number) for matrix in matrices)
        for matrices in layer_matrices(text, kinds)
    )
    table = _linear_from_config("embed_tokens", hidden, number(text, "vocab_size"), 1, bytes_per_number)
    outside = (table,) if tied else (table, table)
    # Gemma 3n and 4: an embedding of each token for each layer.
    per_layer = number(text, "vocab_size_per_layer_input") * number(text, "hidden_size_per_layer_input") * len(kinds)
    total = sum(linear.bytes for layer in (*layers, outside) for linear in layer) + round(per_layer * bytes_per_number)
    has_qk_norm = str(text.get("model_type", "")).startswith(("qwen3", "gemma3", "gemma4", "olmo2"))
    return _Contents(layers, outside, total, width, has_qk_norm)


def _linear_from_config(name: str, inputs: int, outputs: int, experts: int, bytes_per_number: float) -> Linear:
    return Linear(name, inputs, outputs, experts, round(inputs * outputs * experts * bytes_per_number))


def _packed_width(packed: Mapping[str, Any], width: int) -> float:
    """Bytes of one number, its share of the group's scale and bias included."""
    bits, group = number(packed, "bits"), number(packed, "group_size") or 64
    return packed_width(bits, group, str(packed.get("mode") or "affine"), width) if bits else width


def packed_width(bits: int, group: int, mode: str, width: int) -> float:
    """Bytes of one quantised number. Affine groups have a scale and a bias, the floating kinds one byte of scale."""
    return bits / 8 + (2 * width if mode == "affine" else 1) / group


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


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
"""Settings of layers with a state. A model that has one, and does not say which layers are which, has none that are
surely attention."""


def number(text: Mapping[str, Any], *names: str) -> int:
    """The first of these settings that is a size or a count; 0 where none is, or none that a model can have."""
    values = (text.get(name) for name in names)
    return next((value for value in values if type(value) is int and 0 <= value < LARGEST), 0)


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
    """How many layers, counted from the first, may have keys and values of their own; later ones use those of
    earlier ones."""
    return len(kinds) - number(text, "num_kv_shared_layers")


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
    """Projections of queries, keys and values, of the gate, of decay and step size, and of the output
    (arXiv:2412.06464)."""
    hidden, heads = number(text, "hidden_size"), number(text, "linear_num_value_heads")
    keys = number(text, "linear_num_key_heads") * number(text, "linear_key_head_dim")
    values = heads * number(text, "linear_value_head_dim")
    return [
        ("linear_attn.in_proj_qkv", hidden, 2 * keys + values, 1),
        ("linear_attn.in_proj_z", hidden, values, 1),
        ("linear_attn.in_proj_b", hidden, heads, 1),
        ("linear_attn.in_proj_a", hidden, heads, 1),
        ("linear_attn.out_proj", values, hidden, 1),
    ]


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
