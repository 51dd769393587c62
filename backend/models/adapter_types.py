"""Adapter settings: layer names and scale. Imports no engine."""

from __future__ import annotations

import math
from collections.abc import Iterable

from backend.config.setting import AdapterSettings

ALL_LINEAR = "all-linear"
"""peft's name for every linear layer but the output layer."""


def adapter_scale(config: AdapterSettings) -> float:
    """alpha / rank (arXiv:2106.09685, section 4.1), with rsLoRA alpha / √rank (arXiv:2312.03732); `scale` without
    alpha.
    """
    if config.lora_alpha is None:
        return config.scale
    return config.lora_alpha / (math.sqrt(config.rank) if config.use_rslora else config.rank)


def is_named(name: str, keys: Iterable[str]) -> bool:
    """True if one of `keys` equals the layer's name or its end after a dot (q_proj: self_attn.q_proj)."""
    return any(name == key or name.endswith(f".{key}") for key in keys)
