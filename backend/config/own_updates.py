"""Runs whose optimizer or learning rate is an object of the program that called `backend.train`: what its settings say, and who may train it.

config.yaml has `own` in place of a name, and in words what stands for it (`own_optimizer`, `own_schedule`), so that a run can be shown,
compared, exported and evaluated as any other. Only training asks for the objects themselves.
"""

from __future__ import annotations

from typing import Protocol

from backend.config.settings.optimizer import OWN
from backend.utils.errors import ConfigProblem, UserError

OF_THE_RATE = ("learning_rate", "lr_final")
"""Settings of the learning rate that may change during a run, and have no effect on a schedule of one's own."""


class UpdateSettings(Protocol):
    """The settings of a run that say whether objects stand for them."""

    @property
    def optimizer(self) -> str: ...
    @property
    def lr_schedule(self) -> str: ...


def without_program_faults(config: UpdateSettings) -> list[ConfigProblem]:
    """Why these settings cannot be trained by anything but the program that has their objects; none where they can."""
    faults: list[ConfigProblem] = []
    if config.optimizer == OWN:
        sentence = "The optimizer is an object of the program that called train(): train there, or go on with backend.resume(run, optimizer=…)."
        faults.append(ConfigProblem("optimizer", sentence))
    if config.lr_schedule == OWN:
        asked = "optimizer=…" if config.optimizer == OWN else "schedule=…"
        sentence = f"The learning rate is an object of the program that called train(): train there, or go on with backend.resume(run, {asked})."
        faults.append(ConfigProblem("lr_schedule", sentence))
    return faults


def require_no_program(config: UpdateSettings) -> None:
    """Raise UserError for a run whose optimizer or learning rate is an object of a program, before anything of it is touched."""
    if faults := without_program_faults(config):
        raise UserError(faults)
