"""The shape of diary events: what a field must be for readers to meet it.

A diary may be damaged, edited, or made by somebody else. Every reader gets its events through `well_formed`, so that none has to expect
text where a step should be: a field of another type is left out, as if it had not been written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeGuard, cast

LAST_TIME = 253_402_300_800
MOST_STEPS = 2**53
"""Beyond it a float does not tell two steps apart."""
_NUMBERS = {int, float, NoneType}


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value counts steps."""
    return type(value) is int and 0 <= value < MOST_STEPS


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number; true and false are none, nor is a whole number beyond the range of a float."""
    try:
        return type(value) in (int, float) and math.isfinite(cast("float", value))
    except OverflowError:
        return False


def well_formed(event: dict[str, Any]) -> dict[str, Any] | None:
    """The event with the fields that have their type, or None where it has no kind. `event` may be changed."""
    if type(event.get("kind")) is not str:
        return None
    for key in [
        key for key, value in event.items() if value is not None and key in _FIELDS and not _FIELDS[key](value)
    ]:
        del event[key]
    metrics = event.get("metrics")
    if metrics is not None and event["kind"] in ("step", "eval"):
        event["metrics"] = metrics = _finite(metrics)
        # Runs from before December 2026 have TRL's name alone, which is the same number unless rewards are scaled over the batch.
        if "frac_reward_zero_std" in metrics:
            metrics.setdefault("frac_groups_without_signal", metrics["frac_reward_zero_std"])
    return event


def _finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics without what is no number. Most have numbers alone, which is seen without a look at each."""
    values = metrics.values()
    try:
        if set(map(type, values)) <= _NUMBERS and math.isfinite(sum(filter(None, values))):
            return metrics
    except OverflowError:
        pass
    return {key: value for key, value in metrics.items() if value is None or is_number(value)}


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_time(value: object) -> bool:
    """Unix seconds, up to the year 9999: later ones are no dates."""
    return is_number(value) and 0 <= value < LAST_TIME


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_pairs_or_values(value: object) -> bool:
    return isinstance(value, Mapping) and all(type(key) is str for key in cast("Mapping[Any, Any]", value))


_FIELDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("step", "iterations", "seq", "resumed_from", "until", "since"), is_step),
    "t": _is_time,
    **dict.fromkeys(("mono", "progress", "value", "threshold", "seconds", "done", "total"), is_number),
    **dict.fromkeys(
        ("sentence", "advice", "code", "level", "metric", "phase", "word", "source", "reason", "split", "path", "model", "command", "device"), _is_text
    ),
    **dict.fromkeys(("metrics", "versions", "reward_files"), _is_mapping),
    "settings": _is_pairs_or_values,
}  # fmt: skip
"""Field → whether a value is of its type. None is allowed everywhere; fields of later versions pass as they are."""
