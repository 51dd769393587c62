"""What a run's learning-rate settings amount to where they are left empty or given as a share of the run."""

from __future__ import annotations

import math
from typing import Protocol

DEFAULT_FINAL = 2e-6
FINAL_SHARE = 0.2
"""Of the learning rate: the final rate where none is given."""


class WarmUpSettings(Protocol):
    """How long the rate rises."""

    @property
    def lr_schedule(self) -> str: ...
    @property
    def lr_warmup_steps(self) -> int: ...
    @property
    def lr_warmup_ratio(self) -> float | None: ...


def final_rate(learning_rate: float, lr_final: float | None) -> float:
    """The rate that a schedule falls to: `lr_final`, or a fifth of the learning rate where it is empty, or is the default and above the
    learning rate."""
    if lr_final is None or lr_final == DEFAULT_FINAL > learning_rate:
        return FINAL_SHARE * learning_rate
    return lr_final


def warmup_updates(config: WarmUpSettings, updates: int) -> int:
    """Updates over which the rate rises in a run of so many: a share of them, rounded up, where one is given, which holds under every
    schedule; else `lr_warmup_steps`, which `constant` has not."""
    if config.lr_warmup_ratio is not None:
        return math.ceil(config.lr_warmup_ratio * updates)
    return 0 if config.lr_schedule == "constant" else config.lr_warmup_steps
