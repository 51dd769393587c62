"""An optimizer and a schedule that are objects of the program that trains, in place of those that the settings name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx.optimizers import Optimizer

LearningRate = Callable[[int], float]
"""The number of an update, from 0 → its learning rate."""


@dataclass(frozen=True, slots=True)
class OwnUpdates:
    """What a program has given for its run; None for what the settings decide."""

    make: Callable[[float], Optimizer] | None = None
    """Learning rate of the settings → a new optimizer."""
    rate: LearningRate | None = None
    keeps_rate: bool = False
    """Whether the learning rate is the optimizer's own affair: it has several, none, or a schedule inside."""
    compiles: bool = True
    """Whether `mx.compile` may trace its update: code of somebody else may look at its numbers, or count in Python."""


SETTINGS_DECIDE = OwnUpdates()


def rate_of(optimizer: Optimizer) -> float:
    """The learning rate that an optimizer says it has; NaN for one that has none."""
    try:
        return float(optimizer.learning_rate)
    except (KeyError, AttributeError, TypeError, ValueError):
        return float("nan")
