"""Derived values of the learning-rate settings; and runs whose optimizer or schedule is the caller's object, `own`."""

import math
from typing import Any

from backend.utils.errors import ConfigProblem, UserError

OWN = "own"  # value of `optimizer` and `lr_schedule` for an object of the program that calls `backend.train`
OF_THE_RATE = ("learning_rate", "lr_final")  # settings without effect where the schedule is such an object
DEFAULT_FINAL = 2e-6


def final_rate(learning_rate: float, lr_final: float | None) -> float:
    """A fifth of the learning rate if `lr_final` is empty, or is the default and above it."""
    if lr_final is None or lr_final == DEFAULT_FINAL > learning_rate:
        return 0.2 * learning_rate
    return lr_final


def warmup_updates(config: Any, updates: int) -> int:
    """Number of warm-up updates in a run of `updates`. A ratio holds under every schedule; `constant` has no steps."""
    if config.lr_warmup_ratio is not None:
        return math.ceil(config.lr_warmup_ratio * updates)
    return 0 if config.lr_schedule == "constant" else config.lr_warmup_steps


def without_program_faults(config: Any) -> list[ConfigProblem]:
    again = f"backend.resume(run, {'optimizer' if config.optimizer == OWN else 'schedule'}=…)"
    there = f"is an object of the program that called train(): train there, or continue with {again}."
    objects = {"optimizer": "The optimizer", "lr_schedule": "The learning rate"}
    return [ConfigProblem(key, f"{what} {there}") for key, what in objects.items() if getattr(config, key) == OWN]


def require_no_program(config: Any) -> None:
    if faults := without_program_faults(config):
        raise UserError(faults)
