"""Seconds per completion of a model on this machine, from the event logs of earlier runs.

Nothing is measured here. For a model that has not been trained yet there is no forecast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

from backend.config.config import SETTINGS, keys_used_by
from backend.runs.archive import raw_settings
from backend.runs.events import first_and_last_events
from backend.runs.run_folder import RunFolder

COST_SETTINGS = keys_used_by("duration")
"""Settings that change the time of a completion, the model aside. A run that shares more of them predicts better."""
MOST_RUNS = 40
"""The newest runs that are read: an archive may be long, and older runs were made by older versions."""
LEAST_STEPS = 3
"""Shorter runs are left out: the first step includes compilation."""


@dataclass(frozen=True, slots=True)
class CompletionTime:
    """Measured on one earlier run: seconds per completion, training on it included."""

    settings: Mapping[str, Any]
    seconds: float


def seconds_per_completion(values: Mapping[str, Any], known: Iterable[CompletionTime]) -> float | None:
    """The median over the runs of the same model that share most of COST_SETTINGS with `values`; None without such a run."""
    same = [time for time in known if time.settings.get("model") == values["model"]]
    if not same:
        return None
    wanted = _cost_settings(values)
    shared = [
        sum(one == other for one, other in zip(_cost_settings(time.settings), wanted, strict=True)) for time in same
    ]
    most = max(shared)
    return median(time.seconds for time, count in zip(same, shared, strict=True) if count == most)


def _cost_settings(values: Mapping[str, Any]) -> list[Any]:
    """Those of COST_SETTINGS; a run of an older version, which lacks one, had what is its default now."""
    return [values.get(key, SETTINGS[key].default) for key in COST_SETTINGS]


def completion_time_of(run: RunFolder) -> CompletionTime | None:
    """The median over a run's steps; None for fewer than LEAST_STEPS. Reads both ends of the event log, and the settings."""
    first, last = first_and_last_events(run.events)
    by_step = {event.get("step"): event for event in [*first, *last] if event.get("kind") == "step"}
    times = [_positive(event.get("metrics"), "time/step") for event in by_step.values()]
    seconds = [time for time in times if time is not None]
    settings = raw_settings(run)
    if len(seconds) < LEAST_STEPS or not settings:
        return None
    completions = 1
    for key in ("group_size", "batch_size", "gradient_accumulation_steps", "steps_per_generation"):
        value = settings.get(key, 1)
        completions *= value if isinstance(value, int) and value > 0 else 1
    return CompletionTime(settings, median(seconds) / completions)


def _positive(metrics: Any, name: str) -> float | None:
    value = cast("dict[str, Any]", metrics).get(name) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, (int, float)) and value > 0 else None
