"""What training made of single rows of a weight: base + scale · B A by rows (DoRA: at its learned length), or the trained array itself.

By rows, because an original tensor may hold a part of one of mlx-lm's arrays, or several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from backend.export.trained_weights import TrainedWeights
from backend.models.saved_modules import array_names
from backend.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of a weight [R, in]: its change is scale · b a.

    `a` [E, r, in], for E experts of R/E rows each, E = 1 for other layers; `b` [R, r]; `magnitude` [R], the length of every row, under DoRA.
    """

    scale: float
    a: mx.array
    b: mx.array
    magnitude: mx.array | None
    is_linear: bool

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def merged(self, base: mx.array, start: int) -> mx.array:
        """base [n, in], float32: rows from `start` on. → the same rows with the adapter."""
        per_expert, end = self.b.shape[0] // self.a.shape[0], start + base.shape[0]
        changes: list[mx.array] = []
        for expert in range(start // per_expert, -(-end // per_expert)):
            rows = slice(max(start, expert * per_expert), min(end, (expert + 1) * per_expert))
            changes.append(self.b[rows].astype(mx.float32) @ self.a[expert].astype(mx.float32))
        merged = base + self.scale * mx.concatenate(changes)
        if self.magnitude is None:
            return merged
        length = mx.linalg.norm(merged, axis=-1, keepdims=True)
        return self.magnitude[start:end, None].astype(mx.float32) / length * merged


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """What differs from the base, by the name of mlx-lm's array: adapters, or whole arrays under full fine-tuning."""

    adapters: dict[str, LowRank]
    arrays: dict[str, mx.array]

    def changed(self) -> set[str]:
        return {*self.adapters, *self.arrays}

    def rows(self, name: str, start: int, base: mx.array) -> mx.array:
        """The trained rows, float32, of the array `name` from `start` on; `base` [n, in] are the untrained ones."""
        if name in self.adapters:
            return self.adapters[name].merged(base.astype(mx.float32), start)
        array = self.arrays[name]
        return array.reshape(-1, base.shape[-1])[start : start + base.shape[0]].astype(mx.float32)


def trained_rows(trained: TrainedWeights) -> TrainedRows:
    """Raises UserError for an adapter of a kind that is not known here."""
    model = trained.open()
    if trained.adapters is None:
        return TrainedRows({}, dict(tree_flatten(model.parameters())))
    adapted = {name: module for name, module in model.named_modules() if "lora_a" in module}
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    whole = {name: arrays[name] for name in array_names(model, trained.whole_modules())}
    return TrainedRows({f"{name}.weight": _low_rank(name, module) for name, module in adapted.items()}, whole)


def _low_rank(name: str, module: nn.Module) -> LowRank:
    layer: Any = module
    magnitude = layer.m if "m" in layer else None
    match layer:
        case LoRALinear() | DoRALinear():
            return LowRank(layer.scale, layer.lora_a.T[None], layer.lora_b.T, magnitude, True)
        case LoRAEmbedding() | DoRAEmbedding():
            return LowRank(layer.scale, layer.lora_b[None], layer.lora_a, magnitude, False)
        case LoRASwitchLinear():
            experts, outputs, rank = layer.lora_b.shape
            a = layer.lora_a.reshape(experts, rank, -1)
            return LowRank(layer.scale, a, layer.lora_b.reshape(experts * outputs, rank), None, False)
    raise UserError(
        "format",
        f"The adapter of {name} is of a kind ({type(layer).__name__}) that only mlx-lm knows; choose its format.",
    )
