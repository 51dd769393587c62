"""Attach LoRA or DoRA adapters to a model, and find the modules that are trained as a whole.

peft's `modules_to_save` are in adapters.safetensors too, which mlx-lm's `load_adapters` refuses; use our loader.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from backend.config.setting import AdapterSettings
from backend.engine.model_probe import tracing_error
from backend.models.architectures import ALL_LINEAR, adapter_scale, is_named
from backend.utils.errors import UserError
from backend.utils.text import SENTENCE, quote, reason_of

ADAPTABLE_LAYERS = (  # layers that mlx-lm can attach adapters to
    *(nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding),
    *(SwitchLinear, QuantizedSwitchLinear),
)
ADAPTER_ENDS = (".lora_a", ".lora_b", ".m")  # of an adapter's arrays; `m` is DoRA's magnitude
SIXTEEN_BIT_TYPES = (mx.bfloat16, mx.float16)
_LAYER = re.compile(r"^(?:[^.]+\.)*?(?:layers|h|blocks)\.\d+\.(?=.)")  # “model.layers.0.” of a name in a layer


def attach_adapters(
    model: nn.Module, config: AdapterSettings, note: Callable[[str], None] = lambda sentence: None
) -> list[str]:
    """Attach seeded adapters to the last `num_layers`; returns the adapted layers, [] for all. Raises UserError."""
    model.freeze()
    layers, adapted_layers = len(model.layers), adapted_layer_count(model, config.num_layers)  # pyright: ignore
    if config.num_layers > layers:
        note(f"Layers is {config.num_layers}, and the model has {layers}: all of them get adapters.")
    whole = whole_modules(model, config.modules_to_save)
    base = model.leaf_modules()
    # Layers in modules that are trained as a whole need no adapter.
    keys, inside = layer_names(model, config.lora_keys), sorted(_names_in_layers(model))
    beside = _outside(keys or inside, whole)
    if both := [key for key in keys if key not in beside]:
        twice = f"{quote(both[0], 60)} would get an adapter and be trained as a whole"
        raise UserError("modules_to_save", f"{twice}; name it in one of the two.")
    keys = beside if keys or len(beside) < len(inside) else []
    reason = _attach(model, config, keys)
    if reason and not config.lora_keys and (keys := _keys_whose_adapters_run(model, config, base, note)):
        keys = _outside(keys, whole)
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


def without_adapters(model: nn.Module) -> nn.Module:
    """Restore in place the layers that `model` had before adapters were attached."""
    layers = [
        # mlx-lm's names for what an adapter wraps
        (name, module.linear if hasattr(module, "linear") else module.embedding)
        for name, module in model.named_modules()
        if hasattr(module, "lora_a")
    ]
    model.update_modules(tree_unflatten(layers))
    return model


def _attach(model: nn.Module, config: AdapterSettings, keys: list[str]) -> str:
    """Attach adapters to the layers `keys`, [] for all; returns the model's own error, or "". Raises UserError."""
    parameters, is_dora = lora_parameters(config, keys), config.train_type == "dora"
    packed = {name for name, each in adaptable_layers(model).items() if isinstance(each, nn.QuantizedEmbedding)}
    if is_dora and (embeddings := sorted(packed.intersection(keys))):
        what = f"mlx-lm has no DoRA for {quote(embeddings[0], 60)}, a quantised embedding"
        raise UserError("lora_keys", f"{what}; take it out, or choose LoRA.")
    mx.random.seed(config.seed)
    try:
        linear_to_lora_layers(model, adapted_layer_count(model, config.num_layers), parameters, use_dora=is_dora)
    except ValueError as error:
        cannot = f"This model cannot take {config.train_type.upper()} adapters"
        raise UserError("train_type", f"{cannot}: {reason_of(error)}.") from error
    return tracing_error(model)


def _keys_whose_adapters_run(
    model: nn.Module, config: AdapterSettings, base: Any, note: Callable[[str], None]
) -> list[str]:
    """Layers that work with adapters where not all do, or []: some model code reads a layer's weight directly
    (mlx_lm/models/gemma3n.py). `base`: leaf modules without adapters, restored afterwards."""
    model.update_modules(base)
    names, working = sorted(_names_in_layers(model)), list[str]()
    for name in names:
        if not _attach(model, config, [name]):
            working.append(name)
        model.update_modules(base)
    if working:
        others = ", ".join(name for name in names if name not in working)
        note(f"The model's code takes no adapters in {others}; the other layers get them.")
    return working


def layer_names(model: nn.Module, keys: list[str]) -> list[str]:
    """Layers that `keys` match; [] for all adaptable ones. Raises UserError for a key without a match."""
    inside, everywhere = _names_in_layers(model), set(adaptable_layers(model))
    outside = {name for name in everywhere if "layers." not in name}
    names: dict[str, None] = {}
    unknown: list[str] = []
    for key in keys:
        if key == ALL_LINEAR:  # the output layer is in no layer
            within: list[nn.Module] = model.layers  # pyright: ignore
            layers = {name: each for layer in within for name, each in adaptable_layers(layer).items()}
            embeddings = (nn.Embedding, nn.QuantizedEmbedding)
            found = sorted(name for name, layer in layers.items() if not isinstance(layer, embeddings))
        elif key in inside | everywhere:
            found = [key]
        else:
            found = sorted(name for name in inside | outside if is_named(name, [key]))
        names |= dict.fromkeys(found)
        unknown += [] if found else [key]
    if unknown:
        # Names that contain the key first: self_attn.q_proj for q.
        near = sorted(inside | outside, key=lambda name: (not any(key in name for key in unknown if key), name))
        sentence = f"No layer of this model is called {quote(', '.join(unknown), 60) or 'nothing'}; there are "
        raise UserError("lora_keys", f"{sentence}{quote(', '.join(near), SENTENCE - len(sentence) - 1)}.")
    return [] if ALL_LINEAR in keys and names.keys() == inside else list(names)


def _names_in_layers(model: nn.Module) -> set[str]:
    return {name for layer in model.layers for name in adaptable_layers(layer)}  # pyright: ignore


def adaptable_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Layers that support adapters, by name relative to `module`."""
    children = module.named_modules()
    return {name: child for name, child in children if isinstance(child, ADAPTABLE_LAYERS) or hasattr(child, "to_lora")}


def adapted_layer_count(model: nn.Module, num_layers: int) -> int:
    """Number of last layers with adapters; negative `num_layers` means all."""
    layers = len(model.layers)  # pyright: ignore
    return layers if num_layers < 0 else min(num_layers, layers)


def lora_parameters(config: AdapterSettings, keys: list[str]) -> dict[str, Any]:
    """mlx-lm's `lora_parameters`; `keys` [] means all layers."""
    parameters = {"rank": config.rank, "scale": adapter_scale(config), "dropout": config.dropout}
    return parameters | ({"keys": keys} if keys else {})


def adapter_about(
    config: AdapterSettings, model: str, num_layers: int, keys: list[str], whole: list[str]
) -> dict[str, Any]:
    """adapter_config.json for mlx-lm's `load_adapters`. `whole`: modules that were trained as a whole."""
    about = {"fine_tune_type": config.train_type, "model": model, "num_layers": num_layers}
    about |= {"lora_parameters": lora_parameters(config, keys)}
    about |= {"use_rslora": True} if config.use_rslora else {}  # for peft's file; mlx-lm reads the scale
    return about | ({"modules_to_save": whole} if whole else {})


def whole_modules(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Modules by full name that `names` match. Raises UserError for an unknown name or quantised weights."""
    if not (names := list(names)):
        return {}
    modules = {name: module for name, module in model.named_modules() if name and tree_flatten(module.parameters())}
    found: dict[str, nn.Module] = {}
    for key in names:
        meant = {name: module for name, module in modules.items() if is_named(name, [key])}
        if not meant:
            sentence = f"No module of this model is called {quote(key, 40) or 'nothing'}"
            if key.endswith("lm_head"):
                tied = "its output layer is its embedding, which is trained by the name of that"
                raise UserError("modules_to_save", f"{sentence}: {tied}.")
            ends = ", ".join(sorted({_LAYER.sub("", name) for name in modules}))
            raise UserError("modules_to_save", f"{sentence}; there are {quote(ends, SENTENCE - len(sentence) - 13)}.")
        found |= meant
    for name, module in found.items():
        if any("scales" in part for part in module.modules()):
            quantised = f"{quote(name, 60)} is quantised, and quantised weights cannot be trained"
            raise UserError("modules_to_save", f"{quantised}; take it out.")
    return found


def _outside(adaptable: Iterable[str], whole: Mapping[str, nn.Module]) -> list[str]:
    ends = {_LAYER.sub("", name) for name in whole}
    return [name for name in adaptable if not any(f"{name}.".startswith(f"{end}.") for end in ends)]


def array_names(model: nn.Module, modules: Iterable[str]) -> set[str]:
    prefixes = tuple(f"{name}." for name in modules)
    return {name for name, _ in tree_flatten(model.parameters()) if prefixes and name.startswith(prefixes)}
