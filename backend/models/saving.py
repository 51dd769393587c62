"""Write a policy: the whole model for mlx-lm, and its adapter config."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils

from backend.config.setting import ModelSettings
from backend.engine.shared_weights import copy_sharing_arrays
from backend.export.writer import open_vision_part, write_model, write_safetensors
from backend.models.adapters import adapted_layer_count, lora_parameters, whole_modules
from backend.models.policy import Policy
from backend.models.tokenizers import tokenizer_folder
from backend.utils.disk import require_room, whole_folder
from backend.utils.files import names_folder

Arrays = dict[str, mx.array]
HostArrays = dict[str, np.ndarray]  # host views of evaluated arrays


def adapter_config(policy: Policy, config: ModelSettings) -> dict[str, Any]:
    """adapter_config.json for mlx-lm's `load_adapters`."""
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
    """Zero-copy numpy views of evaluated arrays."""
    return {name: np.array(x, copy=False) for name, x in arrays.items()}


def save_arrays(path: Path, arrays: Arrays | HostArrays) -> None:
    """Write a safetensors file. Raises OSError."""
    if any(isinstance(x, np.ndarray) for x in arrays.values()):
        write_safetensors(path, dict(arrays))
        return
    # Through a file of Python's, whose errors keep their errno. Without metadata mlx writes `"__metadata__": null`,
    # which not every reader of safetensors accepts.
    with path.open("wb") as file:
        mx.save_safetensors(file, cast("Arrays", arrays), metadata={"format": "mlx"})


def save_model(policy: Policy, config: ModelSettings, folder: Path) -> None:
    """Replace `folder` by the whole model in its loaded precision. Raises DiskError and keeps the older one."""
    # A folder, never an id: for an id mlx-lm requests a model card from the Hub, and a run must be able to end offline.
    path = Path(config.model).expanduser() if names_folder(config.model) else mlx_lm_utils.hf_repo_to_path(config.model)
    vision, _ = open_vision_part(path, policy.model_config)
    beside = sum(array.nbytes for array in vision.arrays.values()) if vision else 0
    require_room(folder, model_bytes(policy) + beside, "The model")
    path = tokenizer_folder(config.tokenizer) if config.tokenizer else path
    with whole_folder(folder) as draft:
        write_model(_in_original_precision(policy), dict(policy.model_config), path, draft, vision=vision)


def model_bytes(policy: Policy) -> int:
    model = _in_original_precision(policy)  # lazy: nothing is computed
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return sum(array.nbytes for array in arrays.values())


def _in_original_precision(policy: Policy) -> nn.Module:
    dtypes = policy.original_dtypes
    model = copy_sharing_arrays(policy.model)
    model.update(policy.parameters())  # the masters, where the model computes with copies
    model.update(tree_map_with_path(lambda name, x: x.astype(dtypes.get(name, x.dtype)), model.parameters()))
    return model
