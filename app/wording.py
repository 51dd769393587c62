"""A run in words, from sound settings: what it will do, and what is worth knowing before it starts. Text only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.spec.config import SETTINGS

Values = Mapping[str, Any]


def summary(values: Values) -> str:
    """“8 completions for each of 16 prompts a step, 60 steps: 7,680 completions.”"""
    prompts = values["batch_size"] * values["gradient_accumulation_steps"] * values["steps_per_generation"]
    group = counted(values["group_size"], "completion")
    each = f"{group} for each of {prompts:,} prompts a step" if prompts != 1 else f"{group} for one prompt a step"
    staged = _staged(values["stages"])
    steps = staged or values["iters"]
    if values["epochs"] > 0 and not staged:
        return f"{each}, {counted(values['epochs'], 'pass', 'passes')} over the dataset."
    total = values["group_size"] * prompts * steps
    return f"{each}, {counted(steps, 'step')}: {total:,} completions."


def details(values: Values) -> list[str]:
    """Short phrases without a full stop, the weightiest first."""
    found = [_learner(values), _rewards(values), _reference(values)]
    found += _updates(values)
    found.append(_pauses(values))
    if values["lm_studio_name"].strip():
        found.append(f"Goes to LM Studio as {values['lm_studio_name'].strip()}")
    return found


def _staged(stages: Any) -> int:
    """Steps of all stages together; 0 where there are none, or none that can be read yet."""
    given = [stage.get("iters") for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    return sum(iters for iters in given if isinstance(iters, int))


def _updates(values: Values) -> list[str]:
    """How often the weights change in a step, where it is more than once."""
    batches, again = values["steps_per_generation"], values["num_iterations"]
    if batches * again == 1:
        return []
    learnt = f"{counted(batches, 'batch', 'batches')} of a step" if batches > 1 else "each set of completions"
    return [f"{counted(batches * again, 'update')} from {learnt}"]


def counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def choice_label(key: str, value: str) -> str:
    """The word on screen for a menu's value."""
    return next((choice.label for choice in SETTINGS[key].choices if choice.value == value), value)


def _learner(values: Values) -> str:
    model = _model_name(values["model"])
    kind = choice_label("train_type", values["train_type"])
    if values["train_type"] == "full":
        return f"Trains every weight of {model}"
    layers, rank = values["num_layers"], values["rank"]
    where = "all layers" if layers < 0 else "the last layer" if layers == 1 else f"the last {layers:,} layers"
    return f"{kind} of rank {rank} on {where} of {model}"


def _model_name(model: str) -> str:
    """An id without its owner; of a path the last two parts, since many a folder is just called model."""
    parts = Path(model.strip()).parts
    if not parts:
        return "a model still to be chosen"
    return "/".join(parts[-2:]) if model.startswith(("/", "~", ".")) else parts[-1]


def _rewards(values: Values) -> str:
    names = values["reward_functions"]
    return f"Scored by {counted(len(names), 'reward function')}" if names else "Scored by nothing yet"


def _reference(values: Values) -> str:
    if values["beta"] <= 0:
        return "Free to leave the reference model (KL weight 0)"
    return f"Held near the reference model (KL weight {values['beta']:g})"


def _pauses(values: Values) -> str:
    every = values["steps_per_eval"]
    evaluated = f"Evaluated every {counted(every, 'step')}" if every > 1 else "Evaluated every step"
    saved = f"saved every {counted(values['save_every'], 'step')}" if values["save_every"] > 1 else "saved every step"
    return f"{evaluated}, {saved}" if every > 0 else f"Never evaluated on the way, {saved}"
