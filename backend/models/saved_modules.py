"""Modules that are trained as a whole beside adapters, such as an output layer, embeddings or norms: peft's `modules_to_save`.

They stand in adapters.safetensors beside the adapters. mlx-lm's `load_adapters` takes adapters alone and refuses such a file by name; our
own loader, and every export but mlx-lm's adapter, has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from backend.models.adapter_types import is_named
from backend.utils.errors import UserError
from backend.utils.text import quote

SETTING = "modules_to_save"
_SENTENCE = 200
"""Characters of a sentence that lists names."""
SIXTEEN_BIT_TYPES = (mx.bfloat16, mx.float16)
_WITHIN_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.(.+)$")


def whole_modules(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The modules that `names` mean, whole names or their ends, by their full names. Raises UserError for a name that no module has, and for
    a module with quantised weights, which have no gradient."""
    if not (names := list(names)):
        return {}
    modules = {name: module for name, module in model.named_modules() if name and tree_flatten(module.parameters())}
    found: dict[str, nn.Module] = {}
    for key in names:
        meant = {name: module for name, module in modules.items() if is_named(name, [key])}
        if not meant:
            raise UserError(SETTING, _unknown(key, modules))
        found |= meant
    for name, module in found.items():
        if any("scales" in part for part in module.modules()):
            raise UserError(
                SETTING, f"{quote(name, 60)} is quantised, and quantised weights cannot be trained; take it out."
            )
    return found


def _unknown(key: str, modules: Iterable[str]) -> str:
    ends = sorted({_within_layer(name) for name in modules})
    sentence = f"No module of this model is called {quote(key, 40) or 'nothing'}"
    if key.endswith("lm_head"):
        return f"{sentence}: its output layer is its embedding, which is trained by the name of that."
    return f"{sentence}; there are {quote(', '.join(ends), _SENTENCE - len(sentence) - 13)}."


def _within_layer(name: str) -> str:
    found = _WITHIN_LAYER.search(name)
    return found.group(1) if found else name


def without_whole(adaptable: Iterable[str], whole: Iterable[str]) -> list[str]:
    """Those of the layers `adaptable`, by their names within a layer, that are not in a module of `whole`."""
    ends = {_within_layer(name) for name in whole}
    return [name for name in adaptable if not any(f"{name}.".startswith(f"{end}.") for end in ends)]


def masters_of(model: nn.Module) -> Any:
    """The tree of the model's trainable arrays with those of 16 bits in float32, where updates smaller than their last digit count; None
    where there are none in 16 bits."""
    own = model.trainable_parameters()
    if not any(array.dtype in SIXTEEN_BIT_TYPES for array in dict[str, mx.array](tree_flatten(own)).values()):
        return None
    return tree_map(lambda x: x.astype(mx.float32) if x.dtype in SIXTEEN_BIT_TYPES else x, own)


def array_names(model: nn.Module, modules: Iterable[str]) -> set[str]:
    """The names of the arrays in the modules with these full names."""
    prefixes = tuple(f"{name}." for name in modules)
    return {name for name, _ in tree_flatten(model.parameters()) if prefixes and name.startswith(prefixes)}
