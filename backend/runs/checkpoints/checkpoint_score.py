"""The score of a checkpoint, which decides the best one and early stopping: a metric of held-out prompts (`eval/…`) at
the newest evaluation, or a metric of the steps since the checkpoint before."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.config.changeable import STAGE_DATA
from backend.config.config import Config
from backend.runs.checkpoints.checkpoint import TrainingState
from backend.runs.metric_names import EVALUATION
from backend.utils.errors import UserError
from backend.utils.text import quote

REWARD = "reward"


def metric_of(config: Config, *, has_evaluations: bool) -> str:
    """`best_metric`; the reward where that is empty, held-out if the run evaluates."""
    return config.best_metric or (EVALUATION + REWARD if has_evaluations else REWARD)


def check_metric(config: Config, *, has_held_out: bool) -> None:
    """Raises UserError where scores are of held-out prompts, and there are none."""
    if config.best_metric.startswith(EVALUATION) and not has_held_out:
        needs = f"{quote(config.best_metric, 50)} is of held-out prompts, and {quote(Path(config.data), 50)} has none."
        raise UserError("best_metric", f"{needs} Name a Valid split, or set Validation share.")


class CheckpointScore:
    """Follows the metric of a run's scores, which are in the TrainingState."""

    def __init__(self) -> None:
        self._since_save: list[float] = []

    def take_step(self, metrics: Mapping[str, Any], config: Config, *, has_evaluations: bool) -> None:
        self._since_save.append(_number(metrics.get(metric_of(config, has_evaluations=has_evaluations))))

    def take_evaluation(self, state: TrainingState, metrics: Mapping[str, Any], config: Config) -> None:
        """Take the metrics of an evaluation after `state.step`."""
        state.evaluated = state.step
        metric = metric_of(config, has_evaluations=True)
        if metric.startswith(EVALUATION):
            state.score = mean_score([_number(metrics.get(metric.removeprefix(EVALUATION)))])
            observe_score(state, state.score, state.step, config)

    def begin_stage(
        self, state: TrainingState, changed: Collection[str], config: Config, *, has_evaluations: bool
    ) -> None:
        """Begin another series of scores where a stage has other rewards, or other rows for scores of the steps."""
        of_steps = not metric_of(config, has_evaluations=has_evaluations).startswith(EVALUATION)
        others = ("reward_functions", "reward_weights", *(STAGE_DATA if of_steps else ()))
        if config.stages and set(changed) & set(others):
            state.score, state.best_score, state.best_step = None, None, 0
            state.gain, state.scores_without_gain = None, 0
            state.score_series += 1
            self._since_save = []

    def observe_save(self, state: TrainingState, config: Config, *, has_evaluations: bool) -> None:
        """Count the score of the steps at a checkpoint that is due."""
        if not metric_of(config, has_evaluations=has_evaluations).startswith(EVALUATION):
            observe_score(state, mean_score(self._since_save), state.step, config)

    def close_interval(self, state: TrainingState, config: Config, *, has_evaluations: bool) -> None:
        """Put the score of a checkpoint, due or not, into the state."""
        metric = metric_of(config, has_evaluations=has_evaluations)
        # None of them after a save that failed and is tried again: the score stands.
        if self._since_save and not metric.startswith(EVALUATION):
            state.score = mean_score(self._since_save)
        self._since_save = []
        state.score_metric, state.best_is_lowest = config.best_metric, config.best_is_lowest


def mean_score(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def observe_score(state: TrainingState, score: float | None, step: int, config: Config) -> None:
    """Count a score of `step` in the state. A gain is better than the last gain by more than
    `early_stopping_min_delta`."""
    if score is None:
        return
    sign = -1.0 if config.best_is_lowest else 1.0
    if state.gain is None or sign * (score - state.gain) > config.early_stopping_min_delta:
        state.gain, state.scores_without_gain = score, 0
    else:
        state.scores_without_gain += 1
    if state.best_score is None or sign * score > sign * state.best_score:
        state.best_score, state.best_step = score, step


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
