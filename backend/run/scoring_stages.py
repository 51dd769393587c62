"""What completions are judged by at each step: the stage's reward functions, their weights, and the advantages.

Knows no model and no arrays but the advantages; `backend.rewards` does the scoring.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.rewards.resolve import RewardFunction, resolve
from backend.rewards.runner.inputs import TrainerState
from backend.rewards.runner.score import score
from backend.rewards.weights import WeightSchedule
from backend.spec.config import Config
from backend.spec.faults import Mistake
from backend.spec.rewards.catalog import locate_reward_file
from backend.training.advantages import advantages
from backend.types import Group

MLX = re.compile(r"^\s*(?:import|from)\s+mlx(?!_lm_lora)", re.MULTILINE)
"""A line that imports mlx or a library on it; mlx_lm_lora is the table of reward functions alone."""


@dataclass(frozen=True, slots=True)
class ScoringStage:
    """Part of a run with its own functions and weights: steps up to and including `last`."""

    last: int
    functions: list[RewardFunction]
    weights: WeightSchedule

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]


class ScoringStages:
    """Scores groups by the stage of their step. `steps` is the length of the run, which stages decide where there are any."""

    def __init__(self, config: Config, steps: int) -> None:
        self.config = config
        self.stages = stages(config, steps)
        self.steps = self.stages[-1].last
        self.uses_mlx = imports_mlx(self.stages)

    def stage(self, step: int) -> ScoringStage:
        """The stage of `step`, counted from 1; the last one goes on for ever."""
        return next((stage for stage in self.stages if step <= stage.last), self.stages[-1])

    def score(self, groups: list[Group], step: int, epoch: float = 0.0) -> dict[str, float]:
        """Fill in every completion's scores and reward, and what functions logged of it. → metrics that they logged."""
        stage = self.stage(step)
        state = TrainerState(max(step - 1, 0), self.steps, epoch, self.config.max_completion_length)
        report = score(groups, stage.functions, stage.weights.at(step), self.config.reward_timeout, state)
        completions = [one for group in groups for one in group.completions]
        for name, column in report.columns.items():
            for one, value in zip(completions, column, strict=True):
                one.logged[name] = value
        return report.metrics

    def compare(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Fill in every completion's advantage. → reward metrics."""
        stage = self.stage(step)
        completions = [one for group in groups for one in group.completions]
        advantage_B, metrics = advantages(
            [[one.scores[name] for name in stage.names] for one in completions],
            self.config.group_size,
            weights=stage.weights.at(step),
            scale_rewards=self.config.scale_rewards,
            multi_objective_aggregation=self.config.multi_objective_aggregation,
            baseline=self.config.advantage_baseline,
            names=stage.names,
        )
        values: Any = advantage_B.tolist()
        for one, advantage in zip(completions, values, strict=True):
            one.advantage = advantage
        return metrics

    def has_signal(self, group: Group, step: int) -> bool:
        """Whether the completions of a scored group differ in a way that moves the policy."""
        self.compare([group], step)
        return any(one.advantage != 0 for one in group.completions)

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Note how a finished step went, for adaptive weights. → the weights it had, as metrics, where they change."""
        schedule = self.stage(step).weights
        if schedule.kind == "constant":
            return {}
        told = {
            f"reward_weights/{name}": weight
            for name, weight in zip(self.stage(step).names, schedule.at(step), strict=True)
        }
        schedule.observe_scores(step, groups)
        return told

    def notes(self) -> list[str]:
        functions = [function for stage in self.stages for function in stage.functions]
        return list(dict.fromkeys(function.note for function in functions if function.note))

    def state(self) -> list[dict[str, Any]]:
        """What adaptive weights have learnt, stage by stage, as plain JSON; other weights follow from the step."""
        return [stage.weights.state() if stage.weights.kind == "adaptive" else {} for stage in self.stages]

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on from `state`. Raises Mistake when adaptive weights were learnt for other reward functions."""
        for stage, state in zip(self.stages, saved, strict=False):
            if stage.weights.kind != "adaptive" or not state:
                continue
            try:
                stage.weights.restore(state)
            except ValueError:
                raise Mistake(
                    "reward_functions",
                    "The checkpoint's adaptive weights are of other reward functions; resume with the same ones, or "
                    "start a new run.",
                ) from None


def stages(config: Config, steps: int) -> list[ScoringStage]:
    """The run's stages; without `stages:` one that lasts `steps`. Raises Mistake for rewards that cannot be used."""
    if not config.stages:
        functions = resolve(config.reward_functions, reward_file(config))
        return [ScoringStage(steps, functions, _schedule(config, config.weights, functions, steps))]
    made, last = [], 0
    for number, settings in enumerate(config.stages, 1):
        last += settings["iters"]
        functions = resolve(settings.get("reward_functions") or config.reward_functions, reward_file(config))
        made.append(
            ScoringStage(
                last, functions, _schedule(config, _stage_weights(settings, config, functions, number), functions, last)
            )
        )
    return made


def _stage_weights(
    settings: Mapping[str, Any], config: Config, functions: list[RewardFunction], number: int
) -> list[float]:
    """The stage's own weights, else the run's where the functions are the run's, else 1 for each."""
    weights = settings.get("reward_weights")
    if not weights:
        weights = [1.0] * len(functions) if settings.get("reward_functions") else config.weights
    if len(weights) != len(functions):
        raise Mistake(
            "stages", f"Stage {number} has {len(weights)} reward weights for {len(functions)} reward functions."
        )
    return weights


def _schedule(config: Config, weights: list[float], functions: list[RewardFunction], steps: int) -> WeightSchedule:
    kind: Any = config.reward_weight_schedule
    names = [function.name for function in functions]
    try:
        return WeightSchedule(kind, weights, config.reward_weights_final or None, steps, names=names)
    except ValueError as error:
        raise Mistake("reward_weight_schedule", f"{str(error)[0].upper()}{str(error)[1:]}.") from None


def imports_mlx(stages: Sequence[ScoringStage]) -> bool:
    """Whether a file of reward functions imports mlx itself. Such functions are called while nothing else is computed:
    they would share the device and its memory with sampling."""
    files = {function.file for stage in stages for function in stage.functions if function.file}
    return any(MLX.search(file.read_text(encoding="utf-8", errors="replace")) for file in files)


def reward_file(config: Config) -> Path | None:
    return locate_reward_file(config.reward_functions_file) if config.reward_functions_file else None
