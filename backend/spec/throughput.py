"""How long a completion takes with a model on this machine, from the diaries of earlier runs. Nothing is measured here, and
where nothing like the run has been trained yet, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

from backend.spec.archive import edges, settings_of
from backend.spec.config import keys_used_by
from backend.spec.places import RunFolder

SHAPE = keys_used_by("duration")
"""Settings beside the model that make a completion costlier; a run that shares more of them tells more."""
LOOKED_AT = 40
"""Runs, the newest ones: an archive may be long, and older ones were made by older versions."""
FEWEST_STEPS = 3
"""A run's first step compiles and warms up; fewer tell nothing."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What one earlier run cost: seconds for one completion, learning from it included."""

    settings: Mapping[str, Any]
    seconds: float


def seconds_per_completion(values: Mapping[str, Any], known: Iterable[Pace]) -> float | None:
    """The median over the runs of the same model that are most like `values`; None where there is no such run."""
    same: list[Pace] = [pace for pace in known if pace.settings.get("model") == values["model"]]
    if not same:
        return None
    likeness: Callable[[Pace], int] = lambda pace: sum(pace.settings.get(key) == values[key] for key in SHAPE)  # noqa: E731
    best = max(map(likeness, same))
    return median(pace.seconds for pace in same if likeness(pace) == best)


def pace_of(run: RunFolder) -> Pace | None:
    """What a run cost; None where it has too few steps to tell. Reads both ends of its diary, and its settings."""
    first, last = edges(run.events)
    by_step = {event.get("step"): event for event in [*first, *last] if event.get("kind") == "step"}
    told = [_number(event.get("metrics"), "time/step") for event in by_step.values()]
    seconds = sorted(one for one in told if one is not None)
    settings = settings_of(run)
    if len(seconds) < FEWEST_STEPS or not settings:
        return None
    each = 1
    for key in ("group_size", "batch_size", "gradient_accumulation_steps", "steps_per_generation"):
        value = settings.get(key, 1)
        each *= value if isinstance(value, int) and value > 0 else 1
    return Pace(settings, median(seconds) / each)


def _number(metrics: Any, name: str) -> float | None:
    value = cast("dict[str, Any]", metrics).get(name) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, (int, float)) and value > 0 else None
