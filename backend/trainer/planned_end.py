"""Whether a run ends before its last step as planned: a condition on a metric is met, or the reward no longer rises.

Such an end is a finished run: what it was asked for is done. Reads metrics, and neither saves nor ends anything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.config.config import Config
from backend.runs.checkpoints.checkpoint import TrainingState
from backend.runs.checkpoints.checkpoint_score import metric_of
from backend.runs.metric_names import EVALUATION
from backend.runs.stop_conditions import WINDOW, StopCondition, parse_condition


@dataclass(frozen=True, slots=True)
class PlannedEnd:
    """Why a run ends early. `reason`: "stop_when" or "early_stopping"."""

    reason: str
    sentence: str


class MetricWatch:
    """The metrics of the last steps and of the newest evaluation."""

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        """`events`: the event log so far, of which steps and evaluations count."""
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._evaluation: Mapping[str, Any] = {}
        self.seen: set[str] = set()
        """Every metric of a step so far."""
        self._warned_of: set[str] = set()
        for event in events:
            self.take(event)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event of the event log."""
        metrics = event.get("metrics")
        if not isinstance(metrics, dict):
            return
        if event.get("kind") == "step":
            self._steps.append(metrics)
            self.seen.update(metrics)
        elif event.get("kind") == "eval" and event.get("split") == "valid":
            self._evaluation = metrics

    def value(self, metric: str) -> float:
        """The mean of the last `WINDOW` steps, NaN until there are as many or where one has no such number; of a metric of held-out
        prompts the newest."""
        if metric.startswith(EVALUATION):
            return _number(self._evaluation.get(metric.removeprefix(EVALUATION)))
        values = [_number(metrics.get(metric)) for metrics in self._steps]
        return sum(values) / WINDOW if len(values) == WINDOW else math.nan

    def met(self, conditions: Sequence[str]) -> PlannedEnd | None:
        """The end that the first condition which is met has planned."""
        for condition in map(parse_condition, conditions):
            value = self.value(condition.metric)
            if condition.is_met(value):
                return PlannedEnd("stop_when", _met(condition, value))
        return None

    def new_warnings(self, conditions: Sequence[str]) -> list[str]:
        """A sentence for each metric that no step has had, once, when there are steps enough to tell; held-out ones may still come."""
        if len(self._steps) < WINDOW:
            return []
        metrics = [condition.metric for condition in map(parse_condition, conditions)]
        unknown = {name for name in metrics if not name.startswith(EVALUATION)} - self.seen - self._warned_of
        self._warned_of |= unknown
        return [
            f"Stop when names {name}, which no step of this run has: the condition is never met."
            for name in sorted(unknown)
        ]


def _met(condition: StopCondition, value: float) -> str:
    over = "in the newest evaluation" if condition.metric.startswith(EVALUATION) else f"over the last {WINDOW} steps"
    return f"{condition} is met: {value:.4g} {over}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


# ── early stopping ───────────────────────────────────────────────────────────────────────────────────────────────────


def patience_is_over(state: TrainingState, config: Config, *, has_evaluations: bool) -> PlannedEnd | None:
    """The end that early stopping has planned: its scores are those of `backend.runs.checkpoints.checkpoint_score`."""
    patience = config.early_stopping_patience
    if not patience or state.scores_without_gain < patience or state.best_score is None:
        return None
    held_out = metric_of(config, has_evaluations=has_evaluations).startswith(EVALUATION)
    what = config.best_metric or ("Held-out reward" if held_out else "Training reward")
    verb, times = "fallen" if config.best_is_lowest else "risen", "evaluation" if held_out else "checkpoint"
    gain = f" by more than {config.early_stopping_min_delta:g}" if config.early_stopping_min_delta else ""
    count = f"{state.scores_without_gain} {times}{'' if state.scores_without_gain == 1 else 's'}"
    best = f"checkpoint {state.best_step}" if state.best_step else "the model before training"
    return PlannedEnd(
        "early_stopping",
        f"{what} has not {verb}{gain} in {count}. The best, {state.best_score:.4g}, is that of {best}",
    )
