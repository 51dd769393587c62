"""What a step's groups are made under: the clock of the step, what the trainer does meanwhile, and where the groups are laid down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend.trainer.step_timer import StepTimer
from backend.types import Group

Poll = Callable[[str, float | None], None]
"""Takes the phase, and the share of it that is done where that is known. May raise, to give the step up."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """`groups` are filled as they are sampled: of a step that is given up half-way, they are what there is."""

    timer: StepTimer
    poll: Poll
    report: Callable[[str], None]
    """Takes the phase while it is waited for, obeying nothing."""
    groups: list[Group]
