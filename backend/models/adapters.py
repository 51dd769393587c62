"""Adapters: attach LoRA or DoRA to a loaded model, on those layers whose model runs with them.

Knows a module tree and settings; loads and saves nothing (`backend.models.policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from backend.config.setting_groups import AdapterSettings
from backend.engine.model_probe import tracing_error
from backend.models.adapter_types import ALL_LINEAR, adapter_scale, is_named
from backend.models.saved_modules import whole_modules, without_whole
from backend.utils.errors import UserError
from backend.utils.text import quote

ADAPTABLE_LAYERS = (
    *(nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding),
    *(SwitchLinear, QuantizedSwitchLinear),
)
"""Layers that mlx-lm can attach adapters to."""
SENTENCE = 200
"""Characters of a sentence that lists names."""


def attach_adapters(
    model: nn.Module, config: AdapterSettings, note: Callable[[str], None] = lambda sentence: None
) -> list[str]:
    """Freeze the base and attach LoRA or DoRA to its last `num_layers` layers, initialised from `seed`. → the names of the layers
    that take part, [] where it is every layer that can. Raises UserError."""
    model.freeze()
    layers, adapted_layers = len(model.layers), adapted_layer_count(model, config.num_layers)  # pyright: ignore
    if config.num_layers > layers:
        note(f"Layers is {config.num_layers}, and the model has {layers}: all of them get adapters.")
    whole = whole_modules(model, config.modules_to_save)
    keys, base = _keys_beside(model, layer_names(model, config.lora_keys), whole), model.leaf_modules()
    reason = _attach(model, config, keys)
    if reason and not config.lora_keys and (keys := _keys_whose_adapters_run(model, config, base, note)):
        keys = without_whole(keys, whole)
        reason = _attach(model, config, keys)
    if reason:
        raise UserError("train_type", f"This model cannot take {config.train_type.upper()} adapters: {reason}.")
    if not tree_flatten(model.trainable_parameters()):
        last = f"None of the model's last {adapted_layers} layers has"
        if config.lora_keys:
            raise UserError("lora_keys", f"{last} {quote(' or '.join(config.lora_keys))}.")
        raise UserError("train_type", f"{last} anything that takes adapters; choose Full, or another model.")
    for module in whole.values():
        module.unfreeze()
    return keys


def _keys_beside(model: nn.Module, keys: list[str], whole: Mapping[str, nn.Module]) -> list[str]:
    """`keys` without layers in modules that are trained as a whole, which need no adapter. Raises UserError where they were asked for."""
    inside = sorted({name for layer in model.layers for name in adaptable_names(layer)})  # pyright: ignore
    beside = without_whole(keys or inside, whole)
    if both := [key for key in keys if key not in beside]:
        sentence = f"{quote(both[0], 60)} would get an adapter and be trained as a whole; name it in one of the two."
        raise UserError("modules_to_save", sentence)
    return beside if keys or len(beside) < len(inside) else []


def without_adapters(model: nn.Module) -> nn.Module:
    """`model` with the layers that it had before adapters were attached, in place."""
    layers = [
        (
            name,
            module.linear if hasattr(module, "linear") else module.embedding,
        )  # mlx-lm's names for what an adapter wraps
        for name, module in model.named_modules()
        if hasattr(module, "lora_a")
    ]
    model.update_modules(tree_unflatten(layers))
    return model


def _attach(model: nn.Module, config: AdapterSettings, keys: list[str]) -> str:
    """Attach adapters to the layers called `keys`, [] for all. → what the model's code raises with them, or "". Raises UserError where
    mlx-lm has no such adapter for a layer."""
    parameters, is_dora = lora_parameters(config, keys), config.train_type == "dora"
    mx.random.seed(config.seed)
    try:
        linear_to_lora_layers(model, adapted_layer_count(model, config.num_layers), parameters, use_dora=is_dora)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            "train_type", f"This model cannot take {config.train_type.upper()} adapters: {reason}."
        ) from error
    return tracing_error(model)


def _keys_whose_adapters_run(
    model: nn.Module, config: AdapterSettings, base: Any, note: Callable[[str], None]
) -> list[str]:
    """Names of the layers that take adapters in a model where not all of them do, [] where none does: some models' code reads a
    layer's weight itself, which a layer with an adapter has not (mlx_lm/models/gemma3n.py). `base`: the leaf modules without adapters,
    which are back in place afterwards."""
    model.update_modules(base)
    names = sorted({name for layer in model.layers for name in adaptable_names(layer)})  # pyright: ignore
    working: list[str] = []
    for name in names:
        if not _attach(model, config, [name]):
            working.append(name)
        model.update_modules(base)
    if working:
        others = ", ".join(name for name in names if name not in working)
        note(f"The model's code takes no adapters in {others}; the other layers get them.")
    return working


def layer_names(model: nn.Module, keys: list[str]) -> list[str]:
    """The names within a layer (or within the model, outside its layers) of the layers that `keys` mean; [] where they are all that can
    take adapters. Raises UserError for a key that fits no layer; mlx-lm ignores it silently."""
    inside = {name for layer in model.layers for name in adaptable_names(layer)}  # pyright: ignore
    everywhere = adaptable_names(model)
    outside = {name for name in everywhere if "layers." not in name}
    names: dict[str, None] = {}
    unknown: list[str] = []
    for key in keys:
        if key == ALL_LINEAR:
            found = _linear_names(model)
        elif key in inside | everywhere:
            found = [key]
        else:
            found = sorted(name for name in inside | outside if is_named(name, [key]))
        names |= dict.fromkeys(found)
        unknown += [] if found else [key]
    if unknown:
        # Those that have what was asked for in them first: self_attn.q_proj for q.
        listed = ", ".join(
            sorted(inside | outside, key=lambda name: (not any(key in name for key in unknown if key), name))
        )
        sentence = f"No layer of this model is called {quote(', '.join(unknown), 60) or 'nothing'}; there are "
        raise UserError("lora_keys", f"{sentence}{quote(listed, SENTENCE - len(sentence) - 1)}.")
    return [] if ALL_LINEAR in keys and names.keys() == inside else list(names)


def _linear_names(model: nn.Module) -> list[str]:
    """Names, within their layer, of the model's linear layers; the output layer is in none of them."""
    layers: list[nn.Module] = model.layers  # pyright: ignore
    found = {name: layer for within in layers for name, layer in adaptable_layers(within).items()}
    return sorted(name for name, layer in found.items() if not isinstance(layer, (nn.Embedding, nn.QuantizedEmbedding)))


def adaptable_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The layers that take an adapter, by their names relative to `module`."""
    children = module.named_modules()
    return {name: child for name, child in children if isinstance(child, ADAPTABLE_LAYERS) or hasattr(child, "to_lora")}


def adaptable_names(module: nn.Module) -> set[str]:
    """Names, relative to `module`, of the layers that take an adapter."""
    return set(adaptable_layers(module))


def adapted_layer_count(model: nn.Module, num_layers: int) -> int:
    """How many of the last layers get adapters; negative `num_layers` means all."""
    layers = len(model.layers)  # pyright: ignore
    return layers if num_layers < 0 else min(num_layers, layers)


def lora_parameters(config: AdapterSettings, keys: list[str]) -> dict[str, Any]:
    """mlx-lm's `lora_parameters`; `keys` names the layers with adapters, [] for all."""
    return {"rank": config.rank, "scale": adapter_scale(config), "dropout": config.dropout} | (
        {"keys": keys} if keys else {}
    )
