"""Adapter settings: the layers that names mean, and the scale of what an adapter adds. Imports no engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the output layer."""


class ScaleSettings(Protocol):
    """The factor on what an adapter adds, given directly or by LoRA's alpha."""

    @property
    def rank(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def lora_alpha(self) -> float | None: ...
    @property
    def use_rslora(self) -> bool: ...


def adapter_scale(config: ScaleSettings) -> float:
    """alpha / rank (arXiv:2106.09685, section 4.1), under rsLoRA alpha / √rank (arXiv:2312.03732); `scale` where no
    alpha is given."""
    if config.lora_alpha is None:
        return config.scale
    return config.lora_alpha / (math.sqrt(config.rank) if config.use_rslora else config.rank)


def is_named(name: str, keys: Iterable[str]) -> bool:
    """True if one of `keys` is the layer's whole name, or the end of it after a dot (q_proj: self_attn.q_proj)."""
    return any(name == key or name.endswith(f".{key}") for key in keys)
