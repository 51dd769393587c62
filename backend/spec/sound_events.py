"""Which objects of a diary are events: those whose fields have the types that every reader takes for granted.

A disk, an editor or another program may have left anything between two lines. What is no event is skipped in one place, so that no reader
needs a check of its own; kinds that nobody knows yet pass, and readers leave them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

LARGEST_COUNT = 1 << 53
"""Steps, bytes and iterations are below it; every whole number up to it is a float too."""
LARGEST_INT = 1 << 63
"""A larger whole number is no metric: JSON allows any, and not even a float takes them all."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < LARGEST_COUNT


def is_known_number(value: object) -> bool:
    """Whether a value of JSON is a number that arithmetic takes."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and -LARGEST_INT < value < LARGEST_INT


def _or_none(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or fits(value)


FIELDS: dict[str, Callable[[object], bool]] = {
    "kind": _is_text, "t": is_known_number, "mono": is_known_number, "step": _is_count, "path": _is_text, "sentence": _is_text,
    "reason": _is_text, "level": _is_text, "code": _is_text, "advice": _or_none(_is_text), "phase": _is_text,
    "progress": _or_none(is_known_number), "word": _is_text, "source": _is_text, "iterations": _or_none(_is_count),
    "resumed_from": _or_none(_is_count), "split": _is_text, "model": _is_text, "traceback": _is_text, "command": _is_text,
    "metrics": _or_none(lambda value: isinstance(value, dict)), "settings": _or_none(lambda value: isinstance(value, dict)),
}  # fmt: skip
"""Field → whether a value is of its type."""

NEEDS = {
    "step": ("step",), "eval": ("step",), "checkpoint": ("step",), "phase": ("phase",),
    "command": ("word",), "change": ("step", "settings"), "health": ("code", "sentence"),
}  # fmt: skip
"""Kind → the fields without which an event of it means nothing."""


def sound_event(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """The event, without metrics that are no numbers; None for what is no event."""
    for name, item in value.items():
        fits = FIELDS.get(name)
        if fits is not None and not fits(item):
            return None
    if "kind" not in value or any(name not in value for name in NEEDS.get(value["kind"], ())):
        return None
    event = cast("dict[str, Any]", value)
    metrics: Mapping[str, Any] | None = event.get("metrics")
    if metrics and not all(item is None or is_known_number(item) for item in metrics.values()):
        known = {name: item for name, item in metrics.items() if item is None or is_known_number(item)}
        return {**event, "metrics": known}
    return event
