"""The reward functions, their weights and the advantages of each step, by its stage."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from backend.config.config import Config
from backend.config.stages import scoring_of
from backend.rewards.allowed_code import code_files, read_code
from backend.rewards.calls import Poll, wait_on
from backend.rewards.registry import FunctionDescription
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import TrainerState
from backend.rewards.weights import WeightSchedule
from backend.training.advantages import advantages
from backend.types import Group
from backend.utils.errors import UserError
from backend.utils.text import quote

MLX = re.compile(r"^\s*(?:import|from)\s+mlx(?!_lm_lora)", re.MULTILINE)
"""A line that imports mlx or a library built on it; `mlx_lm_lora` is our shim without mlx."""


@dataclass(frozen=True, slots=True)
class ScoringStage:
    """The steps up to and including `last`, with reward functions and weights of their own."""

    last: int
    functions: list[FunctionDescription]
    weights: WeightSchedule
    index: int = 0

    @property
    def names(self) -> list[str]:
        return [function.name for function in self.functions]


class ScoringStages:
    """Scores groups by the stage of their step. `steps` is the length of the run. `poll` is called while functions are
    waited for, and may raise. `uses_mlx`: a reward file imports mlx or a model is a reward, which would share the
    device with sampling. `on_leader`: of several machines, the leader alone scores."""

    def __init__(self, config: Config, scorer: Scorer, steps: int) -> None:
        self.config = config
        self.poll: Poll = wait_on
        self.scorer = scorer
        self.stages = scoring_stages(config, scorer.load(), steps)
        self.steps = self.stages[-1].last
        files = {function.file for stage in self.stages for function in stage.functions if function.file}
        self.uses_mlx = any(model.uses_mlx for model in scorer.models.values())
        self.uses_mlx |= any(MLX.search(file.read_text(encoding="utf-8", errors="replace")) for file in files)
        self.on_leader = scorer.has_models

    def finished(self, step: int) -> Callable[[Group], None] | None:
        """What `Sampler.sample` calls with groups that have ended, so that models may begin in the background."""
        models = self.scorer.stage_models(self.stage(step).index).values()
        on_servers: list[Any] = [model for model in models if not model.uses_mlx]

        def begin(group: Group) -> None:
            for judge in on_servers:
                judge.start(group)

        return begin if on_servers else None

    def change(self, config: Config, steps: int) -> None:
        state, functions = self.state(), [stage.functions for stage in self.stages]
        self.config = config
        self.stages = scoring_stages(config, functions, steps)
        self.steps = self.stages[-1].last
        self.restore(state)

    def stage(self, step: int) -> ScoringStage:
        return next((stage for stage in self.stages if step <= stage.last), self.stages[-1])

    def score(self, groups: list[Group], step: int, epoch: float = 0.0, poll: Poll = wait_on) -> dict[str, float]:
        """Fill in every completion's scores, reward and logged columns. Returns the metrics that functions logged."""

        def polled() -> None:
            self.poll()
            poll()

        stage = self.stage(step)
        if not stage.functions:
            return {}
        state = TrainerState(max(step - 1, 0), self.steps, epoch, self.config.max_completion_length)
        return self.scorer.score(groups, stage.index, stage.weights.at(step), state, polled).metrics

    def fill_advantages(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Fill in every scored completion's advantage. Returns the reward metrics of the groups."""
        stage = self.stage(step)
        if not stage.functions:
            return {}
        completions = [completion for group in groups for completion in group.completions]
        advantage_B, metrics = advantages(
            [[completion.scores[name] for name in stage.names] for completion in completions],
            self.config.group_size,
            weights=stage.weights.at(step),
            scale_rewards=self.config.scale_rewards,
            multi_objective_aggregation=self.config.multi_objective_aggregation,
            baseline=self.config.advantage_baseline,
            names=stage.names,
        )
        values: Any = advantage_B.tolist()
        for completion, advantage in zip(completions, values, strict=True):
            completion.advantage = advantage
        return metrics

    def update_weights(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Let adaptive weights follow a finished step's scores. Returns weights that vary."""
        stage = self.stage(step)
        if stage.weights.kind == "constant":
            return {}
        at_step = zip(stage.names, stage.weights.at(step), strict=True)
        metrics = {f"reward_weights/{name}": weight for name, weight in at_step}
        stage.weights.observe_scores(step, groups)
        return metrics

    def new_notes(self) -> list[str]:
        """Messages of models since the last call."""
        notes, self.scorer.model_notes = self.scorer.model_notes, []
        return notes

    def notes(self) -> list[str]:
        functions = [function for stage in self.stages for function in stage.functions]
        return list(dict.fromkeys([*(function.note for function in functions if function.note), *self.scorer.notes()]))

    def state(self) -> list[dict[str, Any]]:
        return [stage.weights.state() if stage.weights.kind == "adaptive" else {} for stage in self.stages]

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raises UserError for the weights of other reward functions."""
        for stage, state in zip(self.stages, saved, strict=False):
            if stage.weights.kind != "adaptive" or not state:
                continue
            try:
                stage.weights.restore(state)
            except ValueError:
                what = "The checkpoint's adaptive weights are of other reward functions"
                raise UserError("reward_functions", f"{what}; resume with the same ones, or start a new run.") from None


def scoring_stages(config: Config, functions: list[list[FunctionDescription]], steps: int) -> list[ScoringStage]:
    """The run's stages; without `stages:` a single one. Raises UserError."""
    kind: Any = config.reward_weight_schedule

    def stage(last: int, own: list[FunctionDescription], weights: list[float], index: int) -> ScoringStage:
        names, final = [function.name for function in own], config.reward_weights_final
        of_environments = [1.0] * (len(own) - len(weights))  # their `get_reward` come last
        start, end = weights + of_environments, final + of_environments if final else None
        try:
            return ScoringStage(last, own, WeightSchedule(kind, start, end, last, names=names), index)
        except ValueError as error:
            raise UserError("reward_weight_schedule", f"{str(error)[0].upper()}{str(error)[1:]}.") from None

    if not config.stages:
        return [stage(steps, functions[0], config.weights, 0)]
    stages, last, values = [], 0, config.model_dump()
    for index, own in enumerate(functions):
        last += config.stages[index]["iters"]
        scoring = scoring_of(values, index)
        weights = scoring["reward_weights"] or [1.0] * len(scoring["reward_functions"])
        stages.append(stage(last, own, weights, index))
    return stages


def fingerprints(config: Config) -> dict[str, str]:
    """Name → SHA-256 of each readable reward file that these settings name."""
    found: dict[str, str] = {}
    for path in code_files(config.model_dump()):
        with suppress(UserError):
            found[path.name] = read_code(path).fingerprint
    return found


def changed_files(before: Mapping[str, str], now: Mapping[str, str], step: int) -> str:
    """A warning where reward files differ from those that scored the steps up to `step`."""
    changed = [name for name, fingerprint in now.items() if before.get(name, fingerprint) != fingerprint]
    if not changed or not step:
        return ""
    names, have = quote(", ".join(changed), 60), "has" if len(changed) == 1 else "have"
    return (
        f"{names} {have} changed since this run was trained last: the steps up to {step} were scored with the old "
        f"version, those from {step + 1} on with the new one."
    )
