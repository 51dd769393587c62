"""A run that starts from trained adapters: whether they fit the run's own, and loading them in their place.

The run keeps the adapters' shape and scale: another scale would make another model of the same arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from backend.config.setting_groups import AdapterSettings, ModelSettings
from backend.models.adapters import lora_parameters
from backend.models.model_folder import PATH, check_adapter_config
from backend.models.policy import Policy
from backend.runs.saved_weights import SETTING, AdapterSource, adapter_settings, find_adapter
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.safetensors import BrokenFile, read_header
from backend.utils.text import quote, shown_path

LABELS = {"train_type": "Fine-tune", "rank": "Rank", "scale": "Scale"}
"""What an adapter and its run must agree on → the setting's label."""


def check_start(model: nn.Module, config: AdapterSettings, adapter: str, runs_dir: Path | None = None) -> None:
    """Raises UserError where the run cannot start from `adapter`. `model`: with the run's own adapters attached, its weights not read."""
    own: Any = tree_flatten(model.trainable_parameters())
    _check(find_adapter(adapter, runs_dir), config, {name: tuple(array.shape) for name, array in own})


def load_start(policy: Policy, config: ModelSettings, adapter: str, runs_dir: Path | None = None) -> str:
    """Put `adapter` in the place of the policy's own adapters. → a sentence for the event log. Raises UserError."""
    source, own = find_adapter(adapter, runs_dir), policy.trainable()
    _check(source, config, {name: tuple(array.shape) for name, array in own.items()})
    try:
        arrays = cast("dict[str, mx.array]", mx.load(str(source.weights)))
        _require_finite(source, arrays, own)
        policy.assign({name: arrays[name].astype(own[name].dtype) for name in own})
        mx.eval(policy.arrays())
    except (RuntimeError, KeyError) as error:  # changed since its header was read
        raise UserError(
            SETTING, f"The adapter {quote(source.weights, PATH)} cannot be read: {quote(error, 60)}."
        ) from error
    base = adapter_settings(source).get("model", config.model)
    other = "" if base == config.model else f" They were trained on {quote(base, 60)}."
    return f"The adapters start from {source.text}.{other}"


def _require_finite(source: AdapterSource, arrays: Mapping[str, mx.array], own: Iterable[str]) -> None:
    """Raise UserError for numbers with which nothing can be computed: the run would be ended by them later, and something else be blamed."""
    for name in own:
        if not mx.all(mx.isfinite(arrays[name])).item():
            where = f"NaN or infinite numbers in {quote(name, 60)}"
            raise UserError(SETTING, f"The adapter {shown_path(source.text, 50)} has {where}; start from another.")


def _check(source: AdapterSource, config: AdapterSettings, own: Mapping[str, tuple[int, ...]]) -> None:
    if source.about is not None:
        check_adapter_config(source.about, SETTING)
    if faults := list(_disagreements(source, config)):
        raise UserError(faults)
    try:
        stored = {name: array.shape for name, array in read_header(source.weights).items()}
    except BrokenFile as error:
        raise UserError(SETTING, f"{quote(source.weights, PATH)} {error}.") from None
    if why := _misfit(stored, own):
        raise UserError(SETTING, f"The adapter {shown_path(source.text, 50)} does not fit this run: {why}.")


def _disagreements(source: AdapterSource, config: AdapterSettings) -> Iterable[ConfigProblem]:
    theirs = adapter_settings(source)
    ours: dict[str, Any] = lora_parameters(config, []) | {"train_type": config.train_type}
    for key, label in LABELS.items():
        if key in theirs and theirs[key] != ours[key]:
            told = quote(theirs[key], 20)
            yield ConfigProblem(
                key, f"{label} is {quote(ours[key], 20)}, and the adapter to start from has {told}; set it to {told}."
            )


def _misfit(stored: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> str:
    """Why arrays of these shapes are not the run's, as the end of a sentence; "" where they are."""
    other = sorted(name for name in own.keys() & stored.keys() if own[name] != stored[name])
    if other:
        return f"{quote(other[0], 40)} is {stored[other[0]]} there and {own[other[0]]} here"
    if extra := sorted(stored.keys() - own.keys()):
        return f"it has {quote(extra[0], 40)}, which this run does not train (Layers, Target modules)"
    if missing := sorted(own.keys() - stored.keys()):
        return f"it lacks {quote(missing[0], 40)}, which this run trains (Layers, Target modules)"
    return ""
