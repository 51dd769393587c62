"""How a run changes and ends on its way: changed settings, stop conditions, early stopping."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from backend.config.config import Config
from backend.runs.checkpoint import metric_of
from backend.runs.events import EventLog, is_number
from backend.runs.metric_names import COMPARISONS, EVALUATION, WINDOW, parse_condition
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import TrainingState
from backend.runs.steering import (
    Change,
    changed,
    config_at,
    read_changes,
    stage_change,
    take_request,
    write_changes,
)
from backend.utils.errors import UserError


class Steering:
    """The changes of settings of one run; `config`: those of config.yaml. Raises UserError."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._run, self.config = run, config
        self.changes = read_changes(run)
        self._in_event_log: list[Any] = []  # the changes that the event log holds after its last step

    def note_past(self, event: Mapping[str, Any]) -> None:
        """Take an event of the event log: a resume may apply a change once more that was logged before the kill."""
        if event.get("kind") == "step":
            self._in_event_log.clear()
        elif event.get("kind") == "change":
            self._in_event_log.append({key: event.get(key) for key in ("step", "settings")})

    def log(self, change: Change, event_log: EventLog) -> None:
        if change.to_dict() not in self._in_event_log:
            event_log.write("change", **change.to_dict())

    def config_at(self, step: int) -> Config:
        return config_at(self.config, self.changes, step)

    def beginning_at(self, step: int) -> list[Change]:
        of_stage = stage_change(self.config, self.changes, step)
        return ([of_stage] if of_stage else []) + [change for change in self.changes if change.step == step]

    def take(self, begun: int) -> tuple[str, str]:
        """Record the change that the window has requested. → level and sentence."""
        asked = take_request(self._run)
        if not asked:
            return "warning", "The change was not made: its request cannot be read."
        try:
            change = self.record(asked, begun)
        except UserError as error:
            return "warning", " ".join(["The change was not made.", *(fault.sentence for fault in error.faults)])
        return "info", change.sentence if change else "Nothing was changed: the settings have these values already."

    def record(self, asked: Mapping[str, Any], begun: int, *, at_resume: bool = False) -> Change | None:
        """Record a change that holds from the step after `begun`, the last that has begun, and not before earlier
        changes; None where nothing changes. Raises UserError."""
        step = max([begun + 1, *(change.step for change in self.changes)])
        pairs = changed(self.config_at(step), asked, done=step - 1, at_resume=at_resume)
        if not pairs:
            return None
        change = Change(step, pairs)
        write_changes(self._run, [*self.changes, change])
        self.changes.append(change)
        return change


PlannedEnd = tuple[str, str]  # why a run finishes before its last step: "stop_when" or "early_stopping", and a sentence


class MetricWatch:
    """The metrics of the last steps and of the newest evaluation, for `stop_when`."""

    def __init__(self) -> None:
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._evaluation: Mapping[str, Any] = {}
        self.seen: set[str] = set()
        self._warned_of: set[str] = set()

    def take(self, event: Mapping[str, Any]) -> None:
        metrics = event.get("metrics")
        if not isinstance(metrics, dict):
            return
        if event.get("kind") == "step":
            self._steps.append(metrics)
            self.seen.update(metrics)
        elif event.get("kind") == "eval" and event.get("split") == "valid":
            self._evaluation = metrics

    def value(self, metric: str) -> float:
        """The mean of the last `WINDOW` steps, NaN until there are as many; of held-out metrics the newest."""
        is_held_out = metric.startswith(EVALUATION)
        rows = [self._evaluation] if is_held_out else list(self._steps)
        found = [row.get(metric.removeprefix(EVALUATION)) for row in rows]
        values = [float(value) for value in found if is_number(value)]
        return sum(values) / len(values) if len(values) == (1 if is_held_out else WINDOW) else math.nan

    def met(self, conditions: Sequence[str]) -> PlannedEnd | None:
        for condition in map(parse_condition, conditions):
            value = self.value(condition.metric)
            if COMPARISONS[condition.sign](value, condition.limit):
                held_out = condition.metric.startswith(EVALUATION)
                over = "in the newest evaluation" if held_out else f"over the last {WINDOW} steps"
                return "stop_when", f"{condition} is met: {value:.4g} {over}"
        return None

    def new_warnings(self, conditions: Sequence[str]) -> list[str]:
        """A sentence for each metric that no step has had, once."""
        if len(self._steps) < WINDOW:
            return []
        metrics = {condition.metric for condition in map(parse_condition, conditions)}
        unknown = {name for name in metrics if not name.startswith(EVALUATION)} - self.seen - self._warned_of
        self._warned_of |= unknown
        return [
            f"Stop when names {name}, which no step of this run has: the condition is never met."
            for name in sorted(unknown)
        ]


def early_stop(state: TrainingState, config: Config, *, has_evaluations: bool) -> PlannedEnd | None:
    patience = config.early_stopping_patience
    if not patience or state.scores_without_gain < patience or state.best_score is None:
        return None
    held_out = metric_of(config, has_evaluations=has_evaluations).startswith(EVALUATION)
    score = "loss" if config.learns_labels else "reward"
    what = config.best_metric or (f"Held-out {score}" if held_out else f"Training {score}")
    verb, times = "fallen" if config.best_is_lowest else "risen", "evaluation" if held_out else "checkpoint"
    gain = f" by more than {config.early_stopping_min_delta:g}" if config.early_stopping_min_delta else ""
    count = f"{state.scores_without_gain} {times}{'' if state.scores_without_gain == 1 else 's'}"
    best = f"checkpoint {state.best_step}" if state.best_step else "the model before training"
    sentence = f"{what} has not {verb}{gain} in {count}. The best, {state.best_score:.4g}, is that of {best}"
    return "early_stopping", sentence
