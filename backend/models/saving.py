"""Write a policy: the whole model as mlx-lm loads it, and the description of its adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils

from backend.config.setting_groups import ModelSettings
from backend.engine.shared_weights import copy_sharing_arrays
from backend.export.writer import write_model, write_safetensors
from backend.models.adapters import adapted_layer_count, lora_parameters, whole_modules
from backend.models.policy import Policy
from backend.models.tokenizers import tokenizer_folder
from backend.utils.disk_faults import require_room
from backend.utils.files import names_folder
from backend.utils.whole_file import whole_folder

Arrays = dict[str, mx.array]
HostArrays = dict[str, np.ndarray]
"""Views of evaluated arrays, which are written without mlx."""


def adapter_config(policy: Policy, config: ModelSettings) -> dict[str, Any]:
    """The content of adapter_config.json, from which mlx-lm's `load_adapters` rebuilds the adapters."""
    about: dict[str, Any] = {
        "fine_tune_type": config.train_type,
        "model": config.model,
        "num_layers": adapted_layer_count(policy.model, config.num_layers),
        "lora_parameters": lora_parameters(config, policy.adapted_keys),
    }
    if config.use_rslora:  # for peft's file; mlx-lm reads the scale
        about["use_rslora"] = True
    if whole := whole_modules(policy.model, config.modules_to_save):
        about["modules_to_save"] = list(whole)
    return about


def on_host(arrays: Arrays) -> HostArrays:
    """The same numbers for numpy, not copied. For evaluated arrays of types that numpy has."""
    return {name: np.array(x, copy=False) for name, x in arrays.items()}


def save_arrays(path: Path, arrays: Arrays | HostArrays) -> None:
    """Write arrays into a safetensors file. Raises OSError."""
    if any(isinstance(x, np.ndarray) for x in arrays.values()):
        write_safetensors(path, dict(arrays))
        return
    # Through a file of Python's, whose errors keep their errno. Without metadata mlx writes `"__metadata__": null`,
    # which not every reader of safetensors accepts.
    with path.open("wb") as file:
        mx.save_safetensors(file, cast("Arrays", arrays), metadata={"format": "mlx"})


def save_model(policy: Policy, config: ModelSettings, folder: Path) -> None:
    """Replace `folder` by the whole model as `mlx_lm.load` opens it, in the precision that it was loaded with.

    The tokenizer's files are copied from the base model, or from the run's own tokenizer. Raises DiskError; an older
    model in `folder` stays then, and both are on the disk for a moment.
    """
    require_room(folder, model_bytes(policy), "The model")
    # A folder, never an id: for an id mlx-lm requests a model card from the Hub, and a run must be able to end offline.
    path = Path(config.model).expanduser() if names_folder(config.model) else mlx_lm_utils.hf_repo_to_path(config.model)
    path = tokenizer_folder(config.tokenizer) if config.tokenizer else path
    with whole_folder(folder) as draft:
        write_model(_in_original_precision(policy), dict(policy.model_config), path, draft)


def model_bytes(policy: Policy) -> int:
    """Bytes of the whole model on disk in the precision that it was loaded with."""
    model = _in_original_precision(policy)  # lazy: nothing is computed
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return sum(array.nbytes for array in arrays.values())


def _in_original_precision(policy: Policy) -> nn.Module:
    def in_original_dtype(name: str, array: mx.array) -> mx.array:
        return array.astype(policy.original_dtypes.get(name, array.dtype))

    model = copy_sharing_arrays(policy.model)
    model.update(policy.parameters())  # the masters, where the model computes with copies
    model.update(tree_map_with_path(in_original_dtype, model.parameters()))
    return model
