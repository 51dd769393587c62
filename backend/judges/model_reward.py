"""Rewards that are models: what a reward model and a judge have in common. They run in the trainer's process.

Imports no mlx and no client of a server: the window and the reward worker's parent read these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from backend.rewards.calls import Poll
from backend.rewards.errors import Failure, RewardError
from backend.rewards.inputs import TrainerState
from backend.rewards.registry import FunctionDescription
from backend.types import Group
from backend.utils.errors import ConfigProblem
from backend.utils.text import quote


@dataclass(frozen=True, slots=True)
class ModelScores:
    """`scores`: one of each completion in group order, None for no opinion. `columns`: logged beside completions, as
    `name/explanation`. `metrics`: of the step. `notes`: messages for the user."""

    scores: list[float | None]
    columns: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    notes: list[str] = field(default_factory=list[str])


class UnreachableJudgeError(RewardError):
    """A judge's server is gone, and the run should pause until it is back."""

    def __init__(self, judge: FunctionDescription, why: str) -> None:
        sentence = f"The judge {quote(judge.name, 40)} cannot score: {why}."
        super().__init__([ConfigProblem("reward_functions", sentence)], Failure(why))


class ModelReward(Protocol):
    """An entry of `reward_functions` that is a model. Opening it checks everything that shows without its weights."""

    about: FunctionDescription
    """Its name in metrics."""
    uses_mlx: bool
    """It shares the device with sampling."""

    def load(self, folder: Path | None) -> None:
        """Load weights or look for the server, before the first score and again after `close`; does nothing where that
        is done. `folder`: of the run, None outside of one. Raises UserError."""
        ...

    def start(self, group: Group) -> None:
        """A group's last completion has ended while others are decoded: may begin in the background. Groups that were
        not started are scored all the same."""
        ...

    def score(self, groups: Sequence[Group], state: TrainerState, poll: Poll) -> ModelScores:
        """Score every completion. Call `poll` while waiting; it may raise. Raises UserError or RewardError."""
        ...

    def close(self) -> None:
        """Free memory and end what runs in the background; does nothing before `load`."""
        ...
