"""Whether one entry of `stages` has the shape of a stage. What its settings are worth is checked with the others (`backend.spec.stages`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, cast

from backend.spec.faults import Fault
from backend.spec.runs.changeable import STAGE_DATA, STAGE_KEYS, STAGE_OWN, STAGE_SETTINGS
from backend.spec.settings.limits import LARGEST_WEIGHT, MOST_STEPS
from backend.spec.user_input.text import shown


def stage_faults(stage: Mapping[str, Any], name: str) -> Iterator[Fault]:
    strange = [key for key in stage if key not in STAGE_KEYS]
    iters, functions, weights = (stage.get(key) for key in STAGE_OWN)
    if strange:
        sentence = f"{name} has {shown(strange[0], 40)}, which no stage can have of its own; it can have "
        listed = shown(", ".join((*STAGE_OWN, *STAGE_DATA[:1], *STAGE_SETTINGS)), 199 - len(sentence))
        yield Fault("stages", f"{sentence}{listed}.")
    if not isinstance(iters, int) or isinstance(iters, bool) or iters < 1:
        yield Fault("stages", f"{name} needs iters, a whole number of steps above 0.")
    elif iters > MOST_STEPS:
        yield Fault("stages", f"{name} has {shown(iters)} steps; at most {MOST_STEPS:,} can be trained.")
    if functions is not None and not (_is_list_of(functions, str) and functions):
        yield Fault("stages", f"{name}: reward_functions must be a list of names.")
    elif functions and (twice := duplicates(cast("list[str]", functions))):
        yield Fault("stages", f"{name} lists {shown(', '.join(twice))} twice; list each reward function once.")
    if weights is not None and not _is_list_of(weights, (int, float)):
        yield Fault("stages", f"{name}: reward_weights must be a list of numbers.")
    elif weights and not (any(weights) and all(abs(weight) <= LARGEST_WEIGHT for weight in weights)):
        yield Fault(
            "stages", f"{name}: reward_weights must lie within ±{LARGEST_WEIGHT:,}, and at least one of them not be 0."
        )
    elif weights and _is_list_of(functions, str) and functions and len(weights) != len(functions):
        yield Fault("stages", f"{name} has {len(weights)} reward weights for {len(functions)} reward functions.")


def _is_list_of(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether it is a list of these; true and false are no numbers."""
    items = cast("list[Any]", value) if isinstance(value, list) else [None]
    return all(isinstance(item, kind) and not isinstance(item, bool) for item in items)


def duplicates(names: list[str]) -> list[str]:
    """Names that are listed more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)
