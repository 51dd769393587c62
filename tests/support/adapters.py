"""Adapters on disk as a run leaves them (`backend.runs.checkpoint`), without a run."""

import json
from pathlib import Path

import mlx.core as mx

from backend.config.config import Config
from backend.export.writer import adapter_config
from backend.models.policy import Policy


def save_adapters(policy: Policy, config: Config, folder: Path) -> None:
    """Write adapters.safetensors and adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), policy.trainable(), metadata={"format": "mlx"})
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(policy, config)), encoding="utf-8")
