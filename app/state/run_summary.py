"""A run described in words, from valid settings."""

from pathlib import Path

from backend.config.config import SETTINGS, Config
from backend.config.setting import step_parts
from backend.config.stages import stage_settings


def summary(config: Config, seconds: float | None = None, memory: str = "") -> str:
    """“4 completions for each of 2 prompts a step, 600 steps, about 1 h 20 min, 9.8 GB.” `seconds`: of a completion."""
    samples = "sampling" in step_parts(vars(config))
    group, prompts, (steps, completions) = config.group_size if samples else 1, config.prompts_per_step, _length(config)
    if min(group, prompts) < 1 or steps < 0:
        return "Once the marked numbers are right, this says how long the run takes."
    per_step = f"each of {prompts:,} prompts a step" if prompts != 1 else "one prompt a step"
    parts = [f"{count_text(group, 'completion')} for {per_step}" if samples else f"{count_text(prompts, 'row')} a step"]
    passes = f"{count_text(config.epochs, 'pass', 'passes')} over the dataset"
    parts.append(count_text(steps, "step") if steps else passes)
    if seconds is not None and completions:
        parts.append(duration_text(seconds * completions))
    elif seconds is not None:
        parts.append(f"{duration_text(seconds * group * prompts)} a step")
    return ", ".join([*parts, memory] if memory else parts) + "."


def details(config: Config, *, holds_out: bool = True) -> list[str]:
    """Short phrases without a full stop, the most important first. `holds_out`: the dataset has held-out rows."""
    model = name_of_model(config.model)
    layers, batches = config.num_layers, config.steps_per_generation
    where = "all layers" if layers < 0 else "the last layer" if layers == 1 else f"the last {layers:,} layers"
    kinds = {choice.value: choice.label for choice in SETTINGS["train_type"].choices}
    kind = kinds.get(config.train_type, config.train_type)
    is_full = config.train_type == "full"
    phrases = [f"Trains every weight of {model}" if is_full else f"{kind} of rank {config.rank} on {where} of {model}"]
    if config.adapter.strip():
        phrases.append(f"Goes on from the adapter {Path(config.adapter).name}")
    does = step_parts(vars(config))
    if config.train_mode == "sft":
        imitated = "answers of the dataset" if config.learns_labels else "best of its own completions"
        phrases.append(f"Imitates the {imitated}")
    if config.train_mode == "distill":
        phrases.append(f"Learns from the teacher {name_of_model(config.teacher_model)}")
    if "scoring" in does and config.reward_functions:
        phrases.append(f"Scored by {count_text(len(config.reward_functions), 'reward function')}")
    classes = config.environment.values() if isinstance(config.environment, dict) else [config.environment]
    sources = [Path(config.tools_file).name, *(each.rpartition("::")[2] for each in classes), *config.mcp_servers]
    if any(sources) and "sampling" in does:
        phrases.append(f"May call tools of {', '.join(filter(None, sources))}")
    if "policy" in does:
        phrases.append(f"KL penalty {config.beta:g}" if config.beta > 0 else "No KL penalty")
    if config.updates_per_step > 1:
        learnt = f"{count_text(batches, 'batch', 'batches')} of a step" if batches > 1 else "each set of completions"
        phrases.append(f"{count_text(config.updates_per_step, 'update')} from {learnt}")
    if config.holds_output and "sampling" in does:
        phrases.append(f"Output follows a {'regular expression' if config.output_regex else 'JSON schema'}")
    steps, completions = _length(config)
    if completions > 0:
        phrases.append(f"{completions:,} {'completions' if 'sampling' in does else 'rows'} in all")
    saved = "at the end" if 0 < steps < config.save_every else every_text(config.save_every)
    evaluated = f"Evaluated {every_text(config.steps_per_eval)}"
    if not (config.steps_per_eval and config.val_batches):
        evaluated = "Not evaluated during training"
    elif not (holds_out or config.eval_data):
        evaluated = "No held-out rows to evaluate on"
    elif 0 < steps < config.steps_per_eval:
        evaluated = "Evaluated before and after"
    phrases.append(f"{evaluated}, saved {saved}")
    if config.lm_studio_name.strip():
        phrases.append(f"Goes to LM Studio as {config.lm_studio_name.strip()}")
    return phrases


def every_text(steps: int) -> str:
    """“every 50 steps”, “every step”, “every epoch”."""
    return f"every {count_text(steps, 'step')}" if steps > 1 else "every step" if steps == 1 else "every epoch"


def _length(config: Config) -> tuple[int, int]:
    stages = config.stages if isinstance(config.stages, list) else []
    counts = [stage.get("iters") for stage in stages if isinstance(stage, dict)]
    staged = sum(count for count in counts if isinstance(count, int))
    is_valid = len(counts) == len(stages) and all(isinstance(count, int) for count in counts)
    samples = "sampling" in step_parts(vars(config))
    if not staged:
        steps = 0 if config.epochs > 0 else config.iters
        return steps, (config.group_size if samples else 1) * config.prompts_per_step * steps
    values, completions = config.model_dump(warnings=False), 0  # a draft may hold half a number
    for index, stage in enumerate(stages if is_valid else []):
        own = values | stage_settings(values, index)
        prompts = own["batch_size"] * own["gradient_accumulation_steps"] * own["steps_per_generation"]
        completions += stage["iters"] * (own["group_size"] if samples else 1) * prompts
    return staged, completions


def duration_text(seconds: float) -> str:
    """“about 40 s”, “about 1 h 20 min”, with no-break spaces."""
    minutes = round(seconds / 60)
    hours, tens = divmod(round(minutes / 10), 6)
    if seconds < 55:
        span = f"{max(1, round(seconds, -1) if seconds >= 20 else round(seconds)):.0f} s"
    elif minutes < 60:
        span = f"{minutes} min"
    elif hours < 24:
        span = f"{hours} h {tens * 10} min" if tens else f"{hours} h"
    else:
        span = f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"
    return f"about {span}".replace(" ", "\u00a0")


def changed_labels(keys: list[str]) -> str:
    if set(keys) <= {"reward_functions", "reward_weights"}:
        return "Reward functions"
    first = SETTINGS[keys[0]].label
    return first if len(keys) == 1 else f"{first} and {len(keys) - 1} more"


def count_text(number: int, singular: str, plural: str = "") -> str:
    """“1 prompt”, “2 prompts”."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def name_of_model(model: str) -> str:
    parts = Path(model.strip()).parts
    if not parts:
        return "a model still to be chosen"
    return str(Path(*parts[-2:])) if model.startswith(("/", "~", ".")) else parts[-1]
