"""Adapters: attach LoRA or DoRA to a loaded model, on those layers whose model runs with them.

Knows a module tree and settings; loads and saves nothing (`backend.models.policy`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from backend.engine.model_probe import tracing_error
from backend.spec.faults import Mistake
from backend.spec.setting_groups import AdapterSettings
from backend.spec.user_input.text import shown

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
    that take part, [] where it is every layer that can. Raises Mistake."""
    model.freeze()
    layers, adapted_layers = len(model.layers), adapted_layer_count(model, config.num_layers)  # pyright: ignore
    if config.num_layers > layers:
        note(f"Layers is {config.num_layers}, and the model has {layers}: all of them get adapters.")
    _check_lora_keys(model, config.lora_keys)
    keys, base = config.lora_keys, model.leaf_modules()
    reason = _attach(model, config, keys)
    if reason and not keys and (keys := _keys_whose_adapters_run(model, config, base, note)):
        reason = _attach(model, config, keys)
    if reason:
        raise Mistake("train_type", f"This model cannot take {config.train_type.upper()} adapters: {reason}.")
    if not tree_flatten(model.trainable_parameters()):
        last = f"None of the model's last {adapted_layers} layers has"
        if config.lora_keys:
            raise Mistake("lora_keys", f"{last} {shown(' or '.join(config.lora_keys))}.")
        raise Mistake("train_type", f"{last} anything that takes adapters; choose Full, or another model.")
    return keys


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
    """Attach adapters to the layers called `keys`, [] for all. → what the model's code raises with them, or "". Raises Mistake where
    mlx-lm has no such adapter for a layer."""
    parameters, is_dora = lora_parameters(config, keys), config.train_type == "dora"
    mx.random.seed(config.seed)
    try:
        linear_to_lora_layers(model, adapted_layer_count(model, config.num_layers), parameters, use_dora=is_dora)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise Mistake(
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


def _check_lora_keys(model: nn.Module, keys: list[str]) -> None:
    """Raise Mistake for a name that fits no layer; mlx-lm ignores it silently."""
    inside = {name for layer in model.layers for name in adaptable_names(layer)}  # pyright: ignore
    everywhere = adaptable_names(model)
    if unknown := [key for key in keys if key not in inside | everywhere]:
        known = inside | {name for name in everywhere if "layers." not in name}
        # Those that end in what was asked for first: self_attn.q_proj for q_proj.
        listed = ", ".join(
            sorted(known, key=lambda name: (not any(name.endswith(key) for key in unknown if key), name))
        )
        sentence = f"No layer of this model is called {shown(', '.join(unknown), 60) or 'nothing'}; there are "
        raise Mistake("lora_keys", f"{sentence}{shown(listed, SENTENCE - len(sentence) - 1)}.")


def adaptable_names(module: nn.Module) -> set[str]:
    """Names, relative to `module`, of the layers that take an adapter."""
    children = module.named_modules()
    return {name for name, child in children if isinstance(child, ADAPTABLE_LAYERS) or hasattr(child, "to_lora")}


def adapted_layer_count(model: nn.Module, num_layers: int) -> int:
    """How many of the last layers get adapters; negative `num_layers` means all."""
    layers = len(model.layers)  # pyright: ignore
    return layers if num_layers < 0 else min(num_layers, layers)


def lora_parameters(config: AdapterSettings, keys: list[str]) -> dict[str, Any]:
    """mlx-lm's `lora_parameters`; `keys` names the layers with adapters, [] for all."""
    return {"rank": config.rank, "scale": config.scale, "dropout": config.dropout} | ({"keys": keys} if keys else {})
