"""Layer sizes and bytes of a model, from its config.json and the headers of its safetensors files. Without the files
they are computed: exact for usual decoder layers, experts, gated delta nets (Qwen 3 Next, 3.5) and Gemma 4."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

from backend.models.architectures import quantization_of
from backend.utils import documents
from backend.utils.errors import UserError
from backend.utils.files import read_text
from backend.utils.safetensors import BYTES, BrokenFile, read_header

LayerKind = Literal["full", "window", "state"]  # keys and values of all tokens, of a window, or a fixed state

Arrays = Mapping[str, tuple[str, tuple[int, ...]]]  # name of a weight → its safetensors dtype and shape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)\.weight$")
_EXPERT = re.compile(r"experts\.\d+\.")
_NOT_LOADED = re.compile(  # weights of images, sound and multi-token prediction, which mlx-lm leaves in the file
    r"(?:^|\.)(?:"
    r"(?P<sees>vision_tower|vision_model|vision_embedder|embed_vision|visual|multi_modal_projector|connector)"
    r"|audio_tower|embed_audio|mtp)\."
)
_STATE_SIZES = (  # settings of layers with a state
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "mamba_d_ssm",
    "conv_L_cache",
    "linear_num_value_heads",
)

MOST_LAYERS = 10_000
LARGEST = 2**31  # mlx counts in 32 bits


@dataclass(frozen=True, slots=True)
class Linear:
    """One weight matrix. `experts`: the number stacked in it; `bytes` as stored, quantisation scales included."""

    name: str
    inputs: int
    outputs: int
    experts: int
    bytes: int

    @property
    def numbers(self) -> int:
        return self.inputs * self.outputs * self.experts


@dataclass(frozen=True, slots=True)
class Tower:
    """What reads images. `one`: patches of an image of a fixed size, 0 where images vary; `of_token`: patches that
    become one image token. `tokens`: of a prompt's images, at most; 0 in a run on text."""

    bytes: int
    hidden: int
    inner: int
    heads: int
    patch: int
    one: int
    of_token: int
    deepstack: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model. Sizes count numbers, `weights` is in bytes, `width` is the bytes per activation. `kinds`: what each
    layer keeps of earlier tokens. `layers_with_keys`: the number of layers, from the first, with keys and values of
    their own. `outside`: embedding and output layer, a single matrix where they are tied. `exact`: `weights` was read
    from the files. `tower`: what reads images, which `weights` leaves out."""

    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts_per_token: int
    width: int
    quantised: bool
    has_qk_norm: bool
    kinds: tuple[LayerKind, ...]
    window: int
    layers_with_keys: int
    layers: tuple[tuple[Linear, ...], ...]
    outside: tuple[Linear, ...]
    weights: int
    exact: bool
    tower: Tower | None = None

    @property
    def is_transformer(self) -> bool:
        """True if all layers are usual; activations of others are guessed from the matrices."""
        return bool(self.heads) and all(is_usual(layer) for layer in self.layers)

    @property
    def is_attention_only(self) -> bool:
        """True if no layer keeps a state: a prompt is computed once for its group, and completions of unequal length
        are decoded together, with all columns in the cache of every layer."""
        return bool(self.heads) and "state" not in self.kinds

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> list[Linear]:
        return [*(linear for layer in self.layers for linear in layer), *self.outside]

    def reading(self, tokens: int) -> ModelShape:
        """The shape in a run with so many tokens of images in a prompt."""
        return replace(self, tower=replace(self.tower, tokens=tokens)) if self.tower else self

    def cached_numbers(self, columns: int) -> int:
        """Numbers that one row's caches hold of `columns` tokens, states left out."""
        in_window = columns if self.is_attention_only else min(columns, self.window or columns)
        held = {"full": columns, "window": in_window, "state": 0}
        # Where config.json does not say which layers are attention (Jamba), or all keep both (Falcon-H1), the names do.
        by_name = "full" not in self.kinds and "window" not in self.kinds
        total = 0
        for kind, layer in zip(self.kinds[: self.layers_with_keys], self.layers, strict=False):
            named = [linear for linear in layer if linear.name.endswith("k_proj")]
            # Gemma 4's layers have keys of different sizes.
            keys = next((linear.outputs for linear in named if linear.name.endswith("self_attn.k_proj")), self.keys)
            total += 2 * keys * (columns if by_name and named else held[kind])
        return total


def is_usual(layer: tuple[Linear, ...]) -> bool:
    """True if a layer is attention and a gated MLP."""
    return all(any(linear.name.endswith(end) for linear in layer) for end in ("o_proj", "down_proj"))


def shape_of(folder: Path | None) -> ModelShape | None:
    """The shape of the model in `folder`; None without one, and where its config.json lacks sizes."""
    if folder is None:
        return None
    try:
        config = documents.parse_loose_json(read_text(folder / "config.json", "model"))
    except (UserError, documents.BrokenJson):  # whoever opens the model says so
        return None
    if not isinstance(config, dict):
        return None
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with suppress(BrokenFile):
            arrays |= {name: (array.dtype, array.shape) for name, array in read_header(file).items()}
    return shape_from(cast("dict[str, Any]", config), arrays)


def shape_from(config: Mapping[str, Any], arrays: Arrays | None = None) -> ModelShape | None:
    """As `shape_of`, from parsed contents."""
    text = {**config, **_mapping(config.get("text_config"))}
    hidden = number(text, "hidden_size", "d_model", "n_embd")
    count = number(text, "num_hidden_layers", "n_layer", "n_layers")
    if not hidden or not 0 < count <= MOST_LAYERS:
        return None
    heads = number(text, "num_attention_heads", "n_head", "n_heads")
    packed = quantization_of(config)
    width = DTYPE_BYTES.get(str(text.get("torch_dtype") or text.get("dtype") or "").removeprefix("torch."), 2)
    tied = bool(text.get("tie_word_embeddings", True))
    kinds = layer_kinds(text, count)
    sizes: dict[str, Any] = {"width": width}
    sizes |= _from_arrays(arrays, packed, tied) if arrays else _from_config(text, kinds, width, packed, tied)
    layers, tower = sizes["layers"], sizes.pop("tower", 0)
    return ModelShape(
        kind=str(config.get("model_type") or ""),
        hidden=hidden,
        heads=heads,
        kv_heads=number(text, "num_key_value_heads", "n_head_kv") or heads,
        head_dim=number(text, "head_dim") or (hidden // heads if heads else 0),
        vocabulary=number(text, "vocab_size"),
        experts_per_token=number(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk"),
        quantised=bool(packed),
        # The files may have more layers than config.json counts, such as those that predict further tokens.
        kinds=(kinds + kinds[-1:] * len(layers))[: len(layers)],
        window=number(text, "sliding_window"),
        layers_with_keys=len(kinds) - number(text, "num_kv_shared_layers"),
        exact=bool(arrays),
        tower=_tower(config, tower) if tower else None,
        **sizes,
    )


def _tower(config: Mapping[str, Any], size: int) -> Tower | None:
    vision = _mapping(config.get("vision_config"))
    hidden, patch = number(vision, "embed_dim", "hidden_size"), number(vision, "patch_size")
    if not hidden or not patch:
        return None
    one = (number(vision, "image_size") // patch) ** 2
    merged = number(vision, "spatial_merge_size") or number(config, "scale_factor", "downsample_factor") or 1
    return Tower(
        bytes=size,
        hidden=hidden,
        inner=number(vision, "intermediate_size") or 4 * hidden,
        heads=number(vision, "num_attention_heads", "num_heads") or -(-hidden // 64),
        patch=patch,
        one=one,
        of_token=one // max(number(config, "mm_tokens_per_image"), 1) if "mm_tokens_per_image" in config else merged**2,
        deepstack=len(vision.get("deepstack_visual_indexes") or ()),
    )


def _from_arrays(arrays: Arrays, packed: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    others = {name: match for name in arrays if (match := _NOT_LOADED.search(name))}
    tower = sum(BYTES.get(arrays[name][0], 2) * prod(arrays[name][1]) for name in others if others[name]["sees"])
    arrays = {name: about for name, about in arrays.items() if name not in others}
    sizes = {
        name: BYTES.get(kind, 2) * prod(shape)
        for name, (kind, shape) in arrays.items()
        if not (tied and name.endswith("lm_head.weight"))
    }
    layers: dict[int, dict[str, Linear]] = {}
    outside: list[Linear] = []
    for name in sizes:
        kind, shape = arrays[name]
        if not name.endswith(".weight") or len(shape) < 2:
            continue
        stem, inputs = name.removesuffix(".weight"), shape[-1]
        packing = [stem + end for end in (".scales", ".biases") if stem + end in sizes]
        if packing and kind == "U32":  # several quantised numbers in each 32-bit word
            inputs = inputs * 32 // (number(_mapping(packed.get(stem)), "bits") or number(packed, "bits") or 4)
        experts = shape[0] if len(shape) > 2 else 1  # stacked in one array [experts, out, in]
        size = sizes[name] + sum(sizes[part] for part in packing)
        in_layer = _LAYER.search(name)
        if in_layer is None:
            if name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
                outside.append(Linear(stem, inputs, shape[-2], experts, size))
            continue
        short_name = _EXPERT.sub("switch_mlp.", in_layer[2])
        layer = layers.setdefault(int(in_layer[1]), {})
        if before := layer.get(short_name):  # mlx-lm stacks experts that are stored one by one
            experts, size = before.experts + experts, before.bytes + size
        layer[short_name] = Linear(short_name, inputs, shape[-2], experts, size)
    floats = [BYTES[kind] for kind, _ in arrays.values() if kind in ("F32", "F16", "BF16")]
    widths: dict[str, Any] = {"width": max(set(floats), key=floats.count)} if floats else {}
    return widths | {
        "layers": tuple(tuple(layers[i].values()) for i in sorted(layers)),
        "outside": tuple(outside),
        "weights": sum(sizes.values()),
        "tower": tower,
        "has_qk_norm": any(name.endswith(("q_norm.weight", "q_layernorm.weight")) for name in sizes),
    }


def _from_config(
    text: Mapping[str, Any], kinds: tuple[LayerKind, ...], width: int, packed: Mapping[str, Any], tied: bool
) -> dict[str, Any]:
    bits, group = number(packed, "bits"), number(packed, "group_size") or 64
    per_number = packed_width(bits, group, str(packed.get("mode") or "affine"), width) if bits else width

    def linear(name: str, inputs: int, outputs: int, experts: int = 1) -> Linear:
        return Linear(name, inputs, outputs, experts, round(inputs * outputs * experts * per_number))

    layers = tuple(tuple(linear(*matrix) for matrix in _layer_matrices(text, kinds, i)) for i in range(len(kinds)))
    table = linear("embed_tokens", number(text, "hidden_size", "d_model", "n_embd"), number(text, "vocab_size"))
    outside = (table,) if tied else (table, table)
    # Gemma 3n and 4: an embedding of each token for each layer.
    per_layer = number(text, "vocab_size_per_layer_input") * number(text, "hidden_size_per_layer_input") * len(kinds)
    return {
        "layers": layers,
        "outside": outside,
        "weights": sum(each.bytes for layer in (*layers, outside) for each in layer) + round(per_layer * per_number),
        "has_qk_norm": str(text.get("model_type", "")).startswith(("qwen3", "gemma3", "gemma4", "olmo2")),
    }


def packed_width(bits: int, group: int, mode: str, width: int) -> float:
    """Bytes of one quantised number. Affine groups have a scale and a bias, the floating kinds one byte of scale."""
    return bits / 8 + (2 * width if mode == "affine" else 1) / group


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def number(text: Mapping[str, Any], *names: str) -> int:
    """The first of these settings that is a possible size; 0 without any."""
    values = (text.get(name) for name in names)
    return next((value for value in values if type(value) is int and 0 <= value < LARGEST), 0)


def layer_kinds(text: Mapping[str, Any], count: int) -> tuple[LayerKind, ...]:
    types, window = text.get("layer_types"), text.get("sliding_window") and text.get("use_sliding_window", True)
    if isinstance(types, list) and len(cast("list[Any]", types)) == count:
        known: dict[str, LayerKind] = {"full_attention": "full", "attention": "full"}
        known |= {"sliding_attention": "window", "chunked_attention": "window"}
        return tuple(known.get(str(name), "state") for name in cast("list[Any]", types))
    if linear := _mapping(text.get("linear_attn_config")):  # Kimi Linear counts its layers from 1
        states: Any = linear.get("kda_layers")
        states = states if isinstance(states, list) else []
        return tuple("state" if i + 1 in states else "full" for i in range(count))
    every, others = number(text, "full_attention_interval"), "state"
    if not every and window:
        every, others = number(text, "sliding_window_pattern", "_sliding_window_pattern"), "window"
    if every:  # the last of every few layers attends to all tokens
        return tuple("full" if (i + 1) % every == 0 else cast("LayerKind", others) for i in range(count))
    if not number(text, "num_attention_heads", "n_head", "n_heads") or number(text, *_STATE_SIZES):
        return ("state",) * count
    return ("window" if window else "full",) * count


def _layer_matrices(
    text: Mapping[str, Any], kinds: tuple[LayerKind, ...], index: int
) -> list[tuple[str, int, int, int]]:
    """(name within the layer, input size, output size, experts) of one layer's matrices."""
    hidden = number(text, "hidden_size", "d_model", "n_embd")
    heads = number(text, "num_attention_heads", "n_head", "n_heads")
    has_own_keys = index < len(kinds) - number(text, "num_kv_shared_layers")
    delta_heads = number(text, "linear_num_value_heads")
    if kinds[index] == "state" and delta_heads:  # a gated delta net (arXiv:2412.06464)
        keys = number(text, "linear_num_key_heads") * number(text, "linear_key_head_dim")
        values = delta_heads * number(text, "linear_value_head_dim")
        inner = {"qkv": 2 * keys + values, "z": values, "b": delta_heads, "a": delta_heads}
        matrices = [(f"linear_attn.in_proj_{part}", hidden, outputs, 1) for part, outputs in inner.items()]
        matrices.append(("linear_attn.out_proj", values, hidden, 1))
    else:
        head_dim = number(text, "head_dim") or (hidden // heads if heads else 0)
        kv_heads = number(text, "num_key_value_heads") or heads
        if kinds[index] == "full":  # Gemma 4 has other heads where it attends to all tokens
            head_dim = number(text, "global_head_dim") or head_dim
            kv_heads = number(text, "num_global_key_value_heads") or kv_heads
        # Qwen 3 Next and 3.5: the query projection gives the gate of the output too.
        queries = heads * head_dim
        matrices = [("self_attn.q_proj", hidden, (2 if delta_heads else 1) * queries, 1)]
        if has_own_keys:
            names = ("k_proj",) if text.get("attention_k_eq_v") and kinds[index] == "full" else ("k_proj", "v_proj")
            matrices += [(f"self_attn.{name}", hidden, kv_heads * head_dim, 1) for name in names]
        matrices.append(("self_attn.o_proj", queries, hidden, 1))
    if width := number(text, "hidden_size_per_layer_input"):  # Gemma 3n and 4
        matrices += [("per_layer_input_gate", hidden, width, 1), ("per_layer_projection", width, hidden, 1)]

    def gated(name: str, inner: int, experts: int = 1) -> None:
        sizes = [("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden)]
        matrices.extend((f"{name}.{part}", inputs, outputs, experts) for part, inputs, outputs in sizes)

    inner = number(text, "intermediate_size", "n_inner") or 4 * hidden
    experts = number(text, "num_experts", "num_local_experts", "n_routed_experts")
    if not experts:
        # Gemma 4's layers without keys of their own have an MLP of twice the size, unless the config says otherwise.
        is_gemma_4 = str(text.get("model_type") or "").startswith("gemma4")
        is_wide = is_gemma_4 and text.get("use_double_wide_mlp", True) and not has_own_keys
        gated("mlp", (2 if is_wide else 1) * inner)
        return matrices
    has_dense = bool(text.get("enable_moe_block"))  # Gemma 4: experts beside a dense MLP
    if has_dense:
        gated("mlp", inner)
    gated("mlp.switch_mlp", number(text, "moe_intermediate_size") or inner, experts)
    if (shared := number(text, "shared_expert_intermediate_size")) and not has_dense:
        gated("mlp.shared_expert", shared)
    return matrices
