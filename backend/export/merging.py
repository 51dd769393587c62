"""A trained model in the form that an export writes: adapters merged, weights unpacked, cast or quantised.

Everything is lazy: a weight is computed when it is written. Merging is done in float32 and rounded once, at the end; a quantised layer is
unpacked in float32 too, because merging into few bits can lose more than the adapter gained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from backend.export.exports import ExportFormat
from backend.export.forward_pass import in_float32
from backend.models import policy
from backend.utils.errors import UserError

PACKING = ("bits", "group_size", "mode")

BLOCK = 1 << 22
"""Numbers that are quantised together."""


def in_format(model: nn.Module, config: dict[str, Any], format_: ExportFormat) -> tuple[nn.Module, dict[str, Any]]:
    """(the model without adapters and in this format, its config.json). Changes `model`.

    Raises UserError for a quantised layer that mlx-lm cannot unpack.
    """
    keeps_bits = format_.keeps_bits
    dtype = float_type(model)
    changed = [(name, _plain(layer, dtype, keeps_bits)) for name, layer in _layers_to_change(model, keeps_bits)]
    model.update_modules(tree_unflatten(changed))
    if not keeps_bits:
        _check_unpacked(model)
        config = without_quantization(config)
    if format_.dtype:
        policy.cast(model, format_.dtype)
        config = {**config, "torch_dtype": format_.dtype} | ({"dtype": format_.dtype} if "dtype" in config else {})
    if format_.quantization:
        floats = {name: module.weight for name, module in model.named_modules() if _is_large(module)}
        model, config = policy.quantize(model, config, **format_.quantization)
        _quantise_in_blocks(model, floats)
    return model, config


def _layers_to_change(model: nn.Module, keeps_bits: bool) -> Iterator[tuple[str, nn.Module]]:
    """Layers with adapters; unless a quantised base is to stay so, other quantised layers too."""
    adapted = {name for name, module in model.named_modules() if hasattr(module, "fuse")}
    for name, module in model.named_modules():
        is_inside_adapter = name.rpartition(".")[0] in adapted
        if name in adapted or (_is_packed(module) and not keeps_bits and not is_inside_adapter):
            yield name, module


def _plain(layer: nn.Module, dtype: mx.Dtype, keeps_bits: bool) -> nn.Module:
    """The layer without adapter and without packing, each array in the float type it had (`dtype` if packed); with `keeps_bits` packed
    again as it was."""
    children: list[Any] = list(layer.children().values())
    base: Any = next((child for child in children if isinstance(child, nn.Module) and "weight" in child), layer)
    packing = {key: getattr(base, key) for key in PACKING} if _is_packed(base) else {}
    original = {name: array.dtype for name, array in tree_flatten(base.parameters())}
    merged: Any = _unpacked(layer)
    if hasattr(merged, "fuse"):
        merged = merged.fuse(True)

    def as_before(name: str, array: mx.array) -> mx.array:
        type_ = original.get(name, dtype)
        return array.astype(type_ if mx.issubdtype(type_, mx.floating) else dtype)

    merged.update(tree_map_with_path(as_before, merged.parameters()))
    return merged.to_quantized(**packing) if packing and keeps_bits else merged


def _unpacked(layer: nn.Module) -> Any:
    """The layer in float32, its quantised weight unpacked."""
    within: Any = nn.Module()  # mlx-lm replaces the children of a module
    within.layer = layer
    in_float32(within)
    return within.layer


def _is_large(module: nn.Module) -> bool:
    weight = module.get("weight")
    return isinstance(weight, mx.array) and weight.size > BLOCK


def _quantise_in_blocks(model: nn.Module, floats: dict[str, mx.array]) -> None:
    """Have the weights `floats` of what are quantised layers now be quantised block by block, one after another: the same codes. On a CPU mlx
    composes MXFP4 of other operations, which take forty bytes for every number of the array."""
    for name, module in model.named_modules():
        if name not in floats or not _is_packed(module):
            continue
        how: dict[str, Any] = {key: getattr(module, key) for key in PACKING}
        weight, parts = floats[name], []
        rows = max(1, BLOCK * weight.shape[0] // weight.size)
        for start in range(0, weight.shape[0], rows):
            block = weight[start : start + rows]
            # mlx may compute independent operations in any order, and so hold what all of them need.
            block = mx.depends([block], [parts[-1][0]])[0] if parts else block
            parts.append(mx.quantize(block, **how))
        for key, pieces in zip(("weight", "scales", "biases"), zip(*parts, strict=True), strict=False):
            setattr(module, key, mx.concatenate(list(pieces)))


def _is_packed(module: nn.Module) -> bool:
    return "scales" in module and hasattr(module, "bits")


def _check_unpacked(model: nn.Module) -> None:
    """Raise UserError where a layer is still quantised: mlx-lm skips layer classes that it does not know."""
    packed = [name for name, module in model.named_modules() if _is_packed(module)]
    if packed:
        raise UserError(
            "model", f"mlx-lm cannot unpack the quantised layer {packed[0]} of this model, so it cannot be fused."
        )


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without its quantisation, or mlx-lm would expect quantised weights."""
    plain = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if isinstance(inner := plain.get("text_config"), dict):
        plain["text_config"] = without_quantization(inner)
    return plain


def float_type(model: nn.Module) -> mx.Dtype:
    """The floating type of most of the model's numbers (in a quantised model: of scales and norms), adapters aside."""
    sizes: Counter[mx.Dtype] = Counter()
    for name, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating) and not name.endswith((".lora_a", ".lora_b", ".m")):
            sizes[array.dtype] += array.size
    return sizes.most_common(1)[0][0]
