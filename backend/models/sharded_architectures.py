"""Which of mlx-lm's architectures can be trained with each layer divided among several machines, from config.json alone.

An architecture's code has a `shard` method or it has none; what was found out about those that have one is below. `tests/models/
test_sharded_architectures.py` tries all of them on two ranks (`make proofs`) and compares.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from backend.models.architectures import model_type, module_of
from backend.utils.text import quote

WITHOUT_GRADIENT = {
    "deepseek_v2": "of its rotated keys each machine's gradient stays its own",
    "longcat_flash": "of its experts that compute nothing the gradient is summed over the machines once too often",
    "longcat_flash_ngram": "of its experts that compute nothing the gradient is summed over the machines once too often",
    "minimax": "of the norms across its heads each machine's gradient stays its own",
}
"""Architectures whose sharded forward pass is right and whose gradient is not, with the reason as part of a sentence."""


def sharding_refusal(config: Mapping[str, Any]) -> str:
    """Why a model with this config.json cannot be trained divided among machines, in one sentence; "" where nothing is known against it."""
    kind, module = quote(model_type(config), 40), module_of(config)
    if not divides(module):
        return (
            f"mlx-lm has no code that divides a model of the kind {kind}; each machine needs all of it: choose Prompts."
        )
    if reason := WITHOUT_GRADIENT.get(module):
        return f"A model of the kind {kind} cannot be trained divided by mlx-lm's code: {reason}."
    return ""


def divides(module: str) -> bool:
    """Whether this module of mlx_lm.models defines a model that can deal its layers out."""
    try:
        return hasattr(importlib.import_module(f"mlx_lm.models.{module}").Model, "shard")
    except SystemExit:  # a package that its code needs is not installed
        return False
