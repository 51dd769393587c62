"""Optimizers by name, the learning rate of every update, gradient clipping, and an optimizer's state as named arrays.

The learning rate is a plain function of the update's number and is set before each update
(`optimizer.learning_rate = rate(update)`), so a resumed run follows the same curve whatever the optimizer's own step count.
No training loop, no model, no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import optimizers
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

Make = Callable[[float, float, tuple[float, float]], optimizers.Optimizer]
"""(learning rate, weight decay, betas) → optimizer."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make an optimizer, and which of the common settings it has; the others are ignored."""

    make: Make
    has_decay: bool = False
    has_betas: bool = False


def _adam(lr: float, decay: float, betas: tuple[float, float]) -> optimizers.Optimizer:
    # MLX leaves bias correction off: the first updates are then several times larger than in every other library.
    return optimizers.Adam(lr, betas=list(betas), bias_correction=True)


def _adamw(lr: float, decay: float, betas: tuple[float, float]) -> optimizers.Optimizer:
    return optimizers.AdamW(lr, betas=list(betas), weight_decay=decay, bias_correction=True)


def _adafactor(lr: float, decay: float, betas: tuple[float, float]) -> optimizers.Optimizer:
    # By default Adafactor derives a step size of its own and ignores the learning rate.
    return optimizers.Adafactor(lr, weight_decay=decay, relative_step=False, scale_parameter=False)


OPTIMIZERS: dict[str, Recipe] = {
    "adamw": Recipe(_adamw, has_decay=True, has_betas=True),
    "adam": Recipe(_adam, has_betas=True),
    "muon": Recipe(lambda lr, decay, betas: optimizers.Muon(lr, weight_decay=decay), has_decay=True),
    "sgd": Recipe(lambda lr, decay, betas: optimizers.SGD(lr, weight_decay=decay), has_decay=True),
    "lion": Recipe(
        lambda lr, decay, betas: optimizers.Lion(lr, betas=list(betas), weight_decay=decay),
        has_decay=True,
        has_betas=True,
    ),
    "adafactor": Recipe(_adafactor, has_decay=True),
    "rmsprop": Recipe(lambda lr, decay, betas: optimizers.RMSprop(lr)),
    "adagrad": Recipe(lambda lr, decay, betas: optimizers.Adagrad(lr)),
    "adadelta": Recipe(lambda lr, decay, betas: optimizers.AdaDelta(lr)),
    "adamax": Recipe(lambda lr, decay, betas: optimizers.Adamax(lr, betas=list(betas)), has_betas=True),
}


def optimizer(
    name: str, *, learning_rate: float, weight_decay: float = 0.01, betas: tuple[float, float] = (0.9, 0.999)
) -> optimizers.Optimizer:
    """A new optimizer. `weight_decay` and `betas` are ignored by those that have none (`OPTIMIZERS` says which).

    adamw is torch's: decoupled weight decay, bias correction on (Loshchilov and Hutter, arXiv:1711.05101). muon
    orthogonalises the updates of matrices; parameters of one dimension get plain momentum. Raises ValueError for a name
    that is not in `OPTIMIZERS`.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer is one of {', '.join(OPTIMIZERS)}, not {name!r}.")
    return OPTIMIZERS[name].make(learning_rate, weight_decay, betas)


# ── learning rate ────────────────────────────────────────────────────────────────────────────────────────────────────


def schedule(
    kind: str,
    peak: float,
    steps: int,
    *,
    warmup_steps: int = 0,
    warmup_init: float = 0.0,
    decay_fraction: float = 1.0,
    final: float = 0.0,
) -> Callable[[int], float]:
    """The learning rate of update 0, 1, 2, …: `constant`, `linear` or `cosine`.

    `constant` is `peak` throughout and has no warm-up. The others rise linearly from `warmup_init` at update 0 to
    `peak` at update `warmup_steps`, then decay to `final` over `decay_fraction` of the run's `steps` and stay there:
    number for number mlx-lm's `lr_schedule`, which counts the decay from the update after the peak. Raises ValueError for
    another kind.
    """
    if kind == "constant":
        return lambda update: peak
    if kind not in ("linear", "cosine"):
        raise ValueError(f"lr_schedule is constant, linear or cosine, not {kind!r}.")
    decay_steps = max(1, round(decay_fraction * steps))
    decay_start = warmup_steps + 1 if warmup_steps else 0

    def rate(update: int) -> float:
        if update < decay_start:
            return warmup_init + (peak - warmup_init) * update / warmup_steps
        progress = min(1.0, (update - decay_start) / decay_steps)
        left = 1 - progress if kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return final + (peak - final) * left

    return rate


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


def clip_by_norm(grads: Any, max_norm: float | None) -> tuple[Any, mx.array]:
    """The gradients scaled down to a global norm of at most `max_norm`, and their norm before that, a scalar.

    `max_norm` 0 or None never clips. Squares are summed in float32, because 300² overflows float16; each gradient keeps
    its dtype. A norm that is not finite makes the gradients so too: check it before updating.
    """
    squares = [mx.square(g.astype(mx.float32)).sum() for _, g in tree_flatten(grads)]
    norm = mx.sqrt(sum(squares, mx.array(0.0)))
    if not max_norm:
        return grads, norm
    scale = mx.minimum(max_norm / (norm + 1e-6), 1.0)
    return tree_map(lambda g: (g * scale).astype(g.dtype), grads), norm


# ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def state_arrays(optimizer: optimizers.Optimizer) -> dict[str, mx.array]:
    """The optimizer's whole state by dotted name, step count included, as `mx.save_safetensors` takes it."""
    return dict(tree_flatten(optimizer.state))


def restore(optimizer: optimizers.Optimizer, arrays: dict[str, mx.array]) -> None:
    """Put `state_arrays` back, exactly, into an optimizer initialised with the same parameters.

    The state stays the same object, so the compiled update that captured it sees the change. Raises ValueError naming the
    first array that is missing, unknown or of another shape or type: half a state would go on training silently.
    """
    expected = state_arrays(optimizer)
    for name in sorted(expected.keys() | arrays.keys()):
        ours, theirs = (_described(state.get(name)) for state in (expected, arrays))
        if ours != theirs:
            raise ValueError(f"The optimizer's state {name!r} is {theirs} in the checkpoint and {ours} here.")
    optimizer.state.update(tree_map_with_path(lambda name, _: arrays[name], optimizer.state))


def _described(array: mx.array | None) -> str:
    return "missing" if array is None else f"{array.dtype} {tuple(array.shape)}"
