"""A run described in words, from valid settings: a summary sentence, and details worth knowing before it starts. Text only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.config.config import SETTINGS, Config
from backend.config.stages import stage_settings


def summary(config: Config, seconds: float | None = None, memory: str = "") -> str:
    """“4 completions for each of 2 prompts a step, 600 steps, about 1 h 20 min, 9.8 GB.”

    `seconds` is the time that one completion takes, None if unknown; `memory` a figure with its unit, or "".
    """
    group, prompts, steps = config.group_size, config.prompts_per_step, _steps(config)
    per_step = f"{prompts:,} prompts a step" if prompts != 1 else "one prompt a step"
    parts = [f"{count_text(group, 'completion')} for {'each of ' if prompts != 1 else ''}{per_step}"]
    parts.append(
        count_text(steps, "step") if steps else f"{count_text(config.epochs, 'pass', 'passes')} over the dataset"
    )
    if seconds is not None:
        all_of_them = _completions(config)
        step_s = seconds * group * prompts
        parts.append(duration_text(seconds * all_of_them) if all_of_them else f"{duration_text(step_s)} a step")
    return ", ".join([*parts, memory] if memory else parts) + "."


def duration_text(seconds: float) -> str:
    """“about 40 s”, “about 12 min”, “about 1 h 20 min”, “about 2 d 3 h”: no finer than a forecast can be, with no-break
    spaces throughout."""
    return f"about {_span(seconds)}".replace(" ", "\u00a0")


def _span(seconds: float) -> str:
    if seconds < 55:
        return f"{max(1, round(seconds, -1) if seconds >= 20 else round(seconds)):.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(round(minutes / 10), 6)
    if hours < 24:
        return f"{hours} h {rest * 10} min" if rest else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"


def columns_sentence(file: str, columns: Mapping[str, str]) -> str:
    """“questions.csv: prompts from question, answers from answer.”"""
    names = {
        "prompt_feature": "prompts",
        "answer_feature": "answers",
        "type_feature": "types",
        "system_feature": "systems",
    }
    parts = [f"{names[key]} from {column}" for key, column in columns.items()]
    return f"{file}: {', '.join(parts)}."


def changed_labels(keys: list[str]) -> str:
    """The labels of changed settings, for the entry Undo in the menu: the first label, and how many more."""
    if set(keys) <= {"reward_functions", "reward_weights"}:
        return "Reward functions"
    first = SETTINGS[keys[0]].label
    return first if len(keys) == 1 else f"{first} and {len(keys) - 1} more"


def _steps(config: Config) -> int:
    """How many steps the run has; 0 if that depends on the length of the dataset."""
    staged = _staged(config.stages)
    return staged or (0 if config.epochs > 0 else config.iters)


def _completions(config: Config) -> int:
    """How many completions the run samples to learn from; 0 if that depends on the length of the dataset."""
    per_step = config.group_size * config.prompts_per_step
    if not _staged(config.stages):
        return per_step * _steps(config)
    values, total = config.model_dump(), 0
    for index, stage in enumerate(config.stages):
        own = values | stage_settings(values, index)
        prompts = own["batch_size"] * own["gradient_accumulation_steps"] * own["steps_per_generation"]
        total += stage["iters"] * own["group_size"] * prompts
    return total


def details(config: Config) -> list[str]:
    """Short phrases without a full stop, the most important first."""
    phrases = [_learner(config)]
    if config.adapter.strip():
        phrases.append(f"Goes on from the adapter {Path(config.adapter).name}")
    phrases += [_rewards(config), _reference(config), *_updates(config)]
    if config.holds_output:
        phrases.append(f"Completions are held to {'a regular expression' if config.output_regex else 'a JSON schema'}")
    if completions := _completions(config):
        phrases.append(f"{completions:,} completions in all")
    phrases.append(_pauses(config))
    if config.lm_studio_name.strip():
        phrases.append(f"Goes to LM Studio as {config.lm_studio_name.strip()}")
    return phrases


def _staged(stages: Any) -> int:
    """The sum of the stages' steps; 0 if there are no stages, or no valid ones."""
    iters_of = [stage.get("iters") for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    return sum(iters for iters in iters_of if isinstance(iters, int))


def _updates(config: Config) -> list[str]:
    """A phrase about the weight updates of a step, if there is more than one: batches × passes over each."""
    batches, passes = config.steps_per_generation, config.num_iterations
    if batches * passes == 1:
        return []
    learnt = f"{count_text(batches, 'batch', 'batches')} of a step" if batches > 1 else "each set of completions"
    return [f"{count_text(batches * passes, 'update')} from {learnt}"]


def count_text(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def choice_label(key: str, value: str) -> str:
    """The label of a menu's value."""
    return next((choice.label for choice in SETTINGS[key].choices if choice.value == value), value)


def _learner(config: Config) -> str:
    model = name_of_model(config.model)
    kind = choice_label("train_type", config.train_type)
    if config.train_type == "full":
        return f"Trains every weight of {model}"
    layers, rank = config.num_layers, config.rank
    where = "all layers" if layers < 0 else "the last layer" if layers == 1 else f"the last {layers:,} layers"
    return f"{kind} of rank {rank} on {where} of {model}"


def name_of_model(model: str) -> str:
    """An id without its owner; of a path the last two parts, since many folders are just called model."""
    parts = Path(model.strip()).parts
    if not parts:
        return "a model still to be chosen"
    return str(Path(*parts[-2:])) if model.startswith(("/", "~", ".")) else parts[-1]


def _rewards(config: Config) -> str:
    return f"Scored by {count_text(len(config.reward_functions), 'reward function')}"


def _reference(config: Config) -> str:
    if config.beta <= 0:
        return "Free to leave the reference model (Beta 0)"
    return f"Held near the reference model (Beta {config.beta:g})"


def _pauses(config: Config) -> str:
    every = config.steps_per_eval
    evaluated = f"Evaluated every {count_text(every, 'step')}" if every > 1 else "Evaluated every step"
    saved = f"saved every {count_text(config.save_every, 'step')}" if config.save_every > 1 else "saved every step"
    return f"{evaluated}, {saved}" if every > 0 else f"Never evaluated on the way, {saved}"
