"""Learning-rate schedules as functions of the update number. To add one, write its shape here, add it to `SCHEDULES`,
and list it in `backend.config.settings.training`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend.config.updates import final_rate, warmup_updates

NO_WARM_UP_TIMESCALE = 10_000  # of `inverse_sqrt`, in updates, as in transformers


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of every update: linear from `warmup_init` to `peak` at update `warmup_updates`, then down to
    `final` over `decay_fraction` of the run, counted from the update after the peak, as in mlx-lm. Raises ValueError.
    """

    kind: str
    peak: float
    updates: int
    warmup_updates: int = 0
    warmup_init: float = 0.0
    decay_fraction: float = 1.0
    final: float = 0.0
    cycles: int = 1
    power: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(f"lr_schedule is one of {', '.join(SCHEDULES)}, not {self.kind!r}.")

    def __call__(self, update: int) -> float:
        if update < self.start:
            return self.warmup_init + (self.peak - self.warmup_init) * update / self.warmup_updates
        return SCHEDULES[self.kind](self, update - self.start)

    @property
    def start(self) -> int:
        """The first update after the peak; 0 without warm-up."""
        return self.warmup_updates + 1 if self.warmup_updates else 0

    @property
    def fall(self) -> int:
        """Updates over which the rate falls."""
        return max(1, round(self.decay_fraction * self.updates))

    def progress(self, n: int) -> float:
        return min(1.0, n / self.fall)

    def between(self, left: float) -> float:
        return self.final + (self.peak - self.final) * left

    def down_to(self, done: float) -> float:
        return self.peak * (self.final / self.peak) ** done


Shape = Callable[[Schedule, int], float]  # (schedule, n) → the rate n updates after the peak


def constant(curve: Schedule, n: int) -> float:
    return curve.peak


def linear(curve: Schedule, n: int) -> float:
    """final + (peak − final) · (1 − p), p the progress of the fall."""
    return curve.between(1 - curve.progress(n))


def cosine(curve: Schedule, n: int) -> float:
    """final + (peak − final) · (1 + cos π p) / 2 (arXiv:1608.03983, without restarts)."""
    return curve.between((1 + math.cos(math.pi * curve.progress(n))) / 2)


def cosine_with_restarts(curve: Schedule, n: int) -> float:
    """Like `cosine`, with p run through `cycles` times: (1 + cos π (cycles · p mod 1)) / 2; final once p is 1."""
    progress = curve.progress(n)
    if progress >= 1:
        return curve.final
    return curve.between((1 + math.cos(math.pi * (curve.cycles * progress % 1.0))) / 2)


def polynomial(curve: Schedule, n: int) -> float:
    """final + (peak − final) · (1 − p)^power."""
    return curve.between((1 - curve.progress(n)) ** curve.power)


def exponential(curve: Schedule, n: int) -> float:
    """peak · (final / peak)^p."""
    return curve.down_to(curve.progress(n))


def step(curve: Schedule, n: int) -> float:
    """peak · (final / peak)^(⌊cycles · p⌋ / cycles)."""
    # In whole numbers: cycles · p may lie a rounding error below a whole number.
    return curve.down_to(min(curve.cycles, n * curve.cycles // curve.fall) / curve.cycles)


def inverse_sqrt(curve: Schedule, n: int) -> float:
    """peak · √(s / (n + s)), s the updates of the warm-up (arXiv:1706.03762)."""
    timescale = curve.start - 1 if curve.start else NO_WARM_UP_TIMESCALE
    return curve.peak * math.sqrt(timescale / (n + timescale))


def warmup_stable_decay(curve: Schedule, n: int) -> float:
    """peak, then a `cosine` fall over the last updates of the run (arXiv:2404.06395)."""
    stable = max(0, curve.updates - curve.start - curve.fall)
    return cosine(curve, max(0, n - stable))


# linear, cosine, exponential and step as mlx's, the others as transformers'
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


def learning_rates(config: Any, steps: int) -> Schedule:
    updates = steps * config.updates_per_step
    return Schedule(
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
