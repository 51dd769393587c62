"""What is written of a policy: the whole model as mlx-lm loads it, and the description of its adapters.

Checkpoints are written by `backend.run.checkpoint_writer`, exports by `backend.models.export`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm import utils as mlx_lm_utils

from backend.engine.shared_weights import copy_sharing_arrays
from backend.models.adapters import adapted_layer_count, lora_parameters
from backend.models.policy import Policy
from backend.spec.setting_groups import ModelSettings


def adapter_config(policy: Policy, config: ModelSettings) -> dict[str, Any]:
    """The content of adapter_config.json, from which mlx-lm's `load_adapters` rebuilds the adapters."""
    return {
        "fine_tune_type": config.train_type,
        "model": config.model,
        "num_layers": adapted_layer_count(policy.model, config.num_layers),
        "lora_parameters": lora_parameters(config, policy.adapted_keys),
    }


def save_model(policy: Policy, source: str, folder: Path) -> None:
    """Write the whole model into `folder` as `mlx_lm.load` opens it, in the precision that it was loaded with.

    `source` is the base model's folder or id, from which mlx-lm copies further files.
    """

    def in_original_dtype(name: str, array: mx.array) -> mx.array:
        return array.astype(policy.original_dtypes.get(name, array.dtype))

    model = copy_sharing_arrays(policy.model)
    model.update(policy.parameters())  # the masters, where the model computes with copies
    model.update(tree_map_with_path(in_original_dtype, model.parameters()))
    path = Path(source).expanduser()
    # A folder, never an id: for an id mlx-lm requests a model card from the Hub, and a run must be able to end offline.
    path = path if path.is_dir() else mlx_lm_utils.hf_repo_to_path(source)
    mlx_lm_utils.save(folder, path, model, policy.tokenizer, policy.model_config, donate_model=False)
