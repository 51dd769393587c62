"""The learning rate of every update, as a plain function of its number.

The rate is set before each update (`optimizer.learning_rate = rate(update)`), so a resumed run follows the same
curve whatever the optimizer's own step count. To add a schedule, write its shape here, put it into `SCHEDULES`, and
name it in the menu (`backend.config.settings.training`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend.config.updates import final_rate, warmup_updates

NO_WARM_UP_TIMESCALE = 10_000
"""Of `inverse_sqrt` without a warm-up, in updates: as in transformers."""


@dataclass(frozen=True, slots=True)
class ScheduleCurve:
    """What a schedule's shape depends on, beside the number n of updates since the peak."""

    peak: float
    final: float
    updates: int
    """Of the whole run."""
    start: int
    """The first update after the peak; 0 without a warm-up."""
    fall: int
    """Updates over which the rate falls."""
    cycles: int
    power: float

    def progress(self, n: int) -> float:
        """The share of the fall that lies behind update n after the peak, 0 to 1."""
        return min(1.0, n / self.fall)

    def between(self, left: float) -> float:
        """`final` where `left` is 0, `peak` where it is 1."""
        return self.final + (self.peak - self.final) * left

    def down_to(self, done: float) -> float:
        """peak · (final / peak)^done: a fall by equal factors."""
        return self.peak * (self.final / self.peak) ** done


Shape = Callable[[ScheduleCurve, int], float]
"""(curve, n) → the rate n updates after the peak."""


def constant(curve: ScheduleCurve, n: int) -> float:
    """peak."""
    return curve.peak


def linear(curve: ScheduleCurve, n: int) -> float:
    """final + (peak − final) · (1 − p), p the progress of the fall."""
    return curve.between(1 - curve.progress(n))


def cosine(curve: ScheduleCurve, n: int) -> float:
    """final + (peak − final) · (1 + cos π p) / 2 (arXiv:1608.03983, without restarts)."""
    return curve.between((1 + math.cos(math.pi * curve.progress(n))) / 2)


def cosine_with_restarts(curve: ScheduleCurve, n: int) -> float:
    """As `cosine`, with p run through `cycles` times: (1 + cos π (cycles · p mod 1)) / 2; final once p is 1."""
    progress = curve.progress(n)
    if progress >= 1:
        return curve.final
    return curve.between((1 + math.cos(math.pi * (curve.cycles * progress % 1.0))) / 2)


def polynomial(curve: ScheduleCurve, n: int) -> float:
    """final + (peak − final) · (1 − p)^power."""
    return curve.between((1 - curve.progress(n)) ** curve.power)


def exponential(curve: ScheduleCurve, n: int) -> float:
    """peak · (final / peak)^p: the same factor at every update."""
    return curve.down_to(curve.progress(n))


def step(curve: ScheduleCurve, n: int) -> float:
    """peak · (final / peak)^(⌊cycles · p⌋ / cycles): `cycles` falls by the same factor, at equal distances."""
    # In whole numbers: cycles · p may lie a rounding error below a whole number.
    return curve.down_to(min(curve.cycles, n * curve.cycles // curve.fall) / curve.cycles)


def inverse_sqrt(curve: ScheduleCurve, n: int) -> float:
    """peak · √(s / (n + s)), s the updates of the warm-up: it falls throughout, whatever the end of the run
    (arXiv:1706.03762)."""
    timescale = curve.start - 1 if curve.start else NO_WARM_UP_TIMESCALE
    return curve.peak * math.sqrt(timescale / (n + timescale))


def warmup_stable_decay(curve: ScheduleCurve, n: int) -> float:
    """peak, and over the last updates of the run the fall of `cosine` (arXiv:2404.06395)."""
    stable = max(0, curve.updates - curve.start - curve.fall)
    return cosine(curve, max(0, n - stable))


SCHEDULES: dict[str, Shape] = {
    "constant": constant,
    "constant_with_warmup": constant,
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "polynomial": polynomial,
    "exponential": exponential,
    "step": step,
    "inverse_sqrt": inverse_sqrt,
    "warmup_stable_decay": warmup_stable_decay,
}
"""`lr_schedule` → its shape. Linear, cosine, exponential and step are number for number those of mlx, and joined to
the warm-up as mlx-lm joins them; the others are transformers' schedules of these names."""


def schedule(
    kind: str,
    peak: float,
    updates: int,
    *,
    warmup_updates: int = 0,
    warmup_init: float = 0.0,
    decay_fraction: float = 1.0,
    final: float = 0.0,
    cycles: int = 1,
    power: float = 1.0,
) -> Callable[[int], float]:
    """The learning rate of update 0, 1, 2, … of a run of `updates`.

    It rises linearly from `warmup_init` at update 0 to `peak` at update `warmup_updates`, then takes the shape of
    its kind, which falls to `final` over `decay_fraction` of the run and stays there. The fall is counted from the
    update after the peak, as mlx-lm counts it. Raises ValueError for another kind.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"lr_schedule is one of {', '.join(SCHEDULES)}, not {kind!r}.")
    shape, start = SCHEDULES[kind], warmup_updates + 1 if warmup_updates else 0
    curve = ScheduleCurve(peak, final, updates, start, max(1, round(decay_fraction * updates)), cycles, power)

    def rate(update: int) -> float:
        if update < start:
            return warmup_init + (peak - warmup_init) * update / warmup_updates
        return shape(curve, update - start)

    return rate


def learning_rates(config: Any, steps: int) -> Callable[[int], float]:
    """The learning rate of every update of a run of `steps` steps."""
    updates = steps * config.updates_per_step
    return schedule(
        config.lr_schedule,
        config.learning_rate,
        updates,
        warmup_updates=warmup_updates(config, updates),
        warmup_init=config.lr_warmup_init,
        decay_fraction=config.lr_decay_fraction,
        final=final_rate(config.learning_rate, config.lr_final),
        cycles=config.lr_cycles,
        power=config.lr_power,
    )
