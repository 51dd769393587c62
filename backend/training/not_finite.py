"""Finds NaN and infinities in a step. Such an update is never applied; it ends the run."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from backend.training.batch import ints
from backend.training.policy_forward import MicroBatch
from backend.types import Group

Quantity = Literal["reward", "log-probability", "loss", "gradient", "weight"]


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """One parameter's gradient: norm, largest finite magnitude, non-finite entries, entries."""

    name: str
    norm: float
    largest: float
    not_finite: int
    size: int


class NotFiniteError(Exception):
    """`quantity` is not finite; `where` locates it. `update`: from 1, 0 before the first; `tokens`: row of the batch →
    name → a number per completion token."""

    def __init__(self, quantity: Quantity, where: str) -> None:
        super().__init__(f"{quantity}: {where}")
        self.quantity: Quantity = quantity
        self.where = where
        self.update = 0
        self.gradients: list[GradientNorm] = []
        self.tokens: dict[int, dict[str, list[float]]] = {}


LARGEST_SCORE = 1e30  # advantages square differences in float32


def check_scores(groups: Sequence[Group]) -> None:
    """Raises NotFiniteError for scores, or sums of them, that are not finite or too large."""
    for group in groups:
        for completion in group.completions:
            for name, score in [*completion.scores.items(), ("their weighted sum", completion.reward)]:
                if score is not None and not abs(score) <= LARGEST_SCORE:
                    raise NotFiniteError("reward", f"{name} is {score:g}")


def check_sampled(groups: Sequence[Group]) -> None:
    """Raises NotFiniteError if a sampled token has no finite log-probability."""
    for group in groups:
        for completion in group.completions:
            if math.isfinite(sum(completion.logps)):  # one pass in C over every token
                continue
            mask = completion.mask or [1] * len(completion.tokens)
            for number, (logp, is_own) in enumerate(zip(completion.logps, mask, strict=True), 1):
                if is_own and not math.isfinite(logp):
                    raise NotFiniteError("log-probability", f"{logp:g} at token {number} of a completion")


def gradient_norms(gradient: Any) -> list[GradientNorm]:
    """Norm of every parameter's gradient, largest first."""
    arrays: Any = tree_flatten(gradient)
    norms: list[GradientNorm] = []
    for name, x in arrays:
        is_finite = mx.isfinite(x)
        magnitude = mx.where(is_finite, mx.abs(x.astype(mx.float32)), 0.0)
        norm, largest, odd = mx.linalg.norm(x.astype(mx.float32)), magnitude.max(), (~is_finite).sum()
        norms.append(GradientNorm(name, float(norm), float(largest), int(odd), x.size))
    return sorted(norms, key=lambda each: (-each.not_finite, -each.norm if math.isfinite(each.norm) else -math.inf))


def not_finite_arrays(named: Iterable[tuple[str, mx.array | np.ndarray]]) -> list[str]:
    """Names of the arrays with non-finite numbers."""
    named = list(named)
    odd = [name for name, x in named if isinstance(x, np.ndarray) and not np.isfinite(x).all()]
    of_mlx = [(name, x) for name, x in named if isinstance(x, mx.array)]
    floats = [(name, mx.all(mx.isfinite(x))) for name, x in of_mlx if mx.issubdtype(x.dtype, mx.floating) and x.size]
    if floats:
        mx.eval([is_finite for _, is_finite in floats])
    return odd + [name for name, is_finite in floats if not is_finite.item()]


def token_numbers(micro_batches: Sequence[MicroBatch], logps: Iterable[mx.array]) -> dict[int, dict[str, list[float]]]:
    """Per-token numbers of an update, by row of the step's batch. `logps`: log π_θ [B, T] per micro-batch."""
    numbers: dict[int, dict[str, list[float]]] = {}
    for micro_batch, logp_BT in zip(micro_batches, logps, strict=True):
        batch = micro_batch.batch
        arrays = {
            "learned_logp": logp_BT,
            "old_logp": batch.old_logp_BT,
            "reference_logp": batch.ref_logp_BT,
            "importance_ratio": batch.importance_weight_BT,
            "weight": batch.weight_BT,
        }
        columns: dict[str, Any] = {name: x.tolist() for name, x in arrays.items() if x is not None}
        for i, (row, length) in enumerate(zip(ints(batch.row_B), ints(batch.length_B), strict=True)):
            numbers[row] = {name: column[i][:length] for name, column in columns.items()}
    return numbers
