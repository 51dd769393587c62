"""A sweep as plain data: which runs there are, what their settings are, and when configurations are given up.

Successive halving (Jamieson & Talwalkar, 2016, arXiv:1502.07943): all configurations train to the first rung, the best
share `keep` of them goes on to a rung 1/`keep` times as far, and so on; what is left trains to the end. So each rung
costs about the same.

The file is read by `backend.runs.sweeps.sweep`, results are in `backend.runs.sweeps.sweep_results`,
`backend.trainer.sweep` trains.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from backend.config.config import SETTINGS, dump, parse, problems, read, resolve_paths, valid_value
from backend.config.other_programs.translation import translate
from backend.rewards.catalogue import nearest
from backend.runs.metric_names import EVALUATION, our_name
from backend.utils.documents import validation_error
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.text import SENTENCE, cut_in_the_middle, quote

ROUND_STEPS = 10
"""Steps that a run takes before the next one has its turn."""


@dataclass(frozen=True, slots=True)
class Halving:
    """After `first_rung` steps the share `keep` of the configurations goes on; then after first_rung / keep steps, and
    so on."""

    first_rung: int
    keep: float

    def to_dict(self) -> dict[str, Any]:
        return {"first_rung": self.first_rung, "keep": self.keep}


@dataclass(frozen=True, slots=True)
class Rung:
    """After `step` steps, `keep` configurations go on."""

    step: int
    keep: int


@dataclass(frozen=True, slots=True)
class Configuration:
    """One choice of the settings that vary. `number` counts from 1."""

    number: int
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        """“Learning Rate 0.0001, Temp 0.8”."""
        return ", ".join(f"{SETTINGS[key].label} {text_of(value)}" for key, value in self.settings.items())


@dataclass(frozen=True, slots=True)
class Member:
    """One run of a sweep: a configuration and a seed. `run` is the name of its folder."""

    configuration: Configuration
    seed: int
    run: str


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep whose every run has sound settings. Built by `parse_sweep`."""

    name: str
    base: dict[str, Any]
    """Raw settings, under our names."""
    search: Literal["grid", "random"]
    over: dict[str, Any]
    seeds: tuple[int, ...]
    configurations: tuple[Configuration, ...]
    halving: Halving | None
    metric: str
    trials: int | None = None
    search_seed: int = 0
    round_steps: int = ROUND_STEPS

    def members(self) -> list[Member]:
        """Every run, configuration by configuration."""
        digits = len(str(len(self.configurations)))
        return [
            Member(configuration, seed, f"{self.name}-{configuration.number:0{digits}}-seed{seed}")
            for configuration in self.configurations
            for seed in self.seeds
        ]

    def raw_settings(self, member: Member) -> dict[str, Any]:
        """The settings of one run, not validated."""
        return self.base | member.configuration.settings | {"seed": member.seed, "run_name": member.run}

    def every_settings(self) -> list[dict[str, Any]]:
        """The raw settings of each configuration, whose reward files may differ."""
        return [self.base | configuration.settings for configuration in self.configurations]

    def groups(self) -> list[list[Member]]:
        """Runs that are trained in turns in one process, on one base model: those with the same model in the same
        precision. Full fine-tuning changes every weight, so that such a run is by itself."""
        groups: dict[tuple[str, ...], list[Member]] = {}
        for member in self.members():
            config = parse(self.raw_settings(member))
            base = (config.model, config.quantization, config.dtype, config.device)
            key = (*base, member.run) if config.train_type == "full" else base
            groups.setdefault(key, []).append(member)
        return list(groups.values())

    def rungs(self) -> list[Rung]:
        """Where configurations are given up; empty without halving."""
        return rungs(self.halving, len(self.configurations), self.steps or 0, self.steps_per_eval)

    @property
    def steps(self) -> int | None:
        """The length of every run in steps; None where the dataset decides (`epochs`, `stages`)."""
        config = parse(self.base)
        return None if config.epochs or config.stages else config.iters

    @property
    def steps_per_eval(self) -> int:
        return parse(self.base).steps_per_eval

    def to_dict(self) -> dict[str, Any]:
        """What `parse_sweep` reads as the same sweep."""
        random_keys = {"trials": self.trials, "search_seed": self.search_seed} if self.search == "random" else {}
        return {
            "name": self.name,
            "search": self.search,
            "over": self.over,
            **random_keys,
            "seeds": list(self.seeds),
            "halving": self.halving.to_dict() if self.halving else "off",
            "metric": self.metric,
            "round_steps": self.round_steps,
            "base": self.base,
        }


def text_of(value: Any) -> str:
    """A value as a table shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "+".join(map(text_of, cast("list[Any]", value))) or "none"
    return str(value)


def rungs(halving: Halving | None, configurations: int, steps: int, steps_per_eval: int) -> list[Rung]:
    """The rungs of a run of `steps` steps: multiples of `steps_per_eval`, since each needs a held-out evaluation."""
    found: list[Rung] = []
    alive, step = configurations, float(halving.first_rung) if halving else math.inf
    while halving and alive > 1 and step < steps:
        alive = max(1, math.ceil(alive * halving.keep - 1e-9))  # 10 · 0.3 is a little above 3
        found.append(Rung(round(step), alive))
        step = math.ceil(step / halving.keep / steps_per_eval - 1e-9) * steps_per_eval
    return found


def training_steps(configurations: int, seeds: int, steps: int, at: list[Rung]) -> int:
    """Steps of all runs together, those given up at a rung counted up to it."""
    total, before, alive = 0, 0, configurations
    for rung in at:
        total += alive * (rung.step - before)
        before, alive = rung.step, rung.keep
    return (total + alive * (steps - before)) * seeds


KEYS = ("name", "base", "search", "over", "trials", "search_seed", "seeds", "halving", "metric", "round_steps")
HALVING_KEYS = ("first_rung", "keep")
DISTRIBUTIONS = ("uniform", "log_uniform")
FIXED = {
    "seed": "seeds go under seeds",
    "run_name": "the sweep names its runs",
    "iters": "all runs of a sweep have the same length",
    "epochs": "all runs of a sweep have the same length",
    "lm_studio_name": "one model can have the name",
}
"""Settings that cannot vary, and why."""
LABEL = 50
"""Most characters of a configuration's label in a sentence."""
MOST_RUNS = 500
"""Runs of one sweep."""
DRAWS_PER_TRIAL = 200
"""How often random search draws again where it meets a configuration that it has."""


def load_sweep(path: str | Path) -> SweepPlan:
    """The sweep of a YAML file; paths in it are relative to the file. Raises UserError."""
    path = user_path(str(path), "config")
    raw = read(path)
    base = raw.get("base")
    if isinstance(base, str):
        raw["base"] = read(path.parent / base)
    elif isinstance(base, dict):
        raw["base"] = resolve_paths(path.parent, cast("dict[str, Any]", base))
    if isinstance(over := raw.get("over"), dict):
        raw["over"] = {key: _beside(path.parent, key, values) for key, values in cast("dict[str, Any]", over).items()}
    return parse_sweep({"name": path.stem} | raw)


def _beside(folder: Path, key: str, values: Any) -> Any:
    if not isinstance(values, list):
        return values
    return [resolve_paths(folder, {key: value})[key] for value in cast("list[Any]", values)]


def parse_sweep(raw: Mapping[str, Any]) -> SweepPlan:
    """The sweep of a raw mapping, whose `base` is a mapping of settings. Raises UserError with every fault."""
    if why := validation_error(raw):
        raise UserError("sweep", f"The sweep {why}.")
    faults = [ConfigProblem(str(key), _unknown_key(str(key), KEYS, "a sweep")) for key in raw if key not in KEYS]
    base, base_faults = _base(raw.get("base"))
    search = raw.get("search", "grid")
    if search not in ("grid", "random"):
        faults.append(ConfigProblem("search", f"The search cannot be {quote(search)}; it is grid or random."))
    over, over_faults = _over(raw.get("over"), search)
    numbers, number_faults = _numbers(raw, search)
    halving, halving_fault = _halving(raw.get("halving", "off"))
    metric = raw.get("metric", "reward")
    # Under the name that evaluations have it by in the event log: TRL's is taken too.
    metric = our_name(metric).removeprefix(EVALUATION) if isinstance(metric, str) else ""
    if not metric:
        faults.append(ConfigProblem("metric", "The metric must be the name of a held-out metric, such as reward."))
    name = raw.get("name", "sweep")
    if not isinstance(name, str) or not name or set(name) & set('/\\:\n\t"') or name.startswith("."):
        faults.append(ConfigProblem("name", f"The name {quote(name)} cannot be a folder's name."))
    faults += [*base_faults, *over_faults, *number_faults, *halving_fault]
    if faults:
        raise UserError(faults)
    configurations = _configurations(over, search, numbers["trials"], numbers["search_seed"])
    plan = SweepPlan(
        str(name),
        base,
        search,
        over,
        tuple(numbers["seeds"]),
        configurations,
        halving,
        metric,
        numbers["trials"],
        numbers["search_seed"],
        numbers["round_steps"],
    )
    _check_plan(plan)
    return plan


def _base(base: Any) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """The base's settings under our names."""
    if not isinstance(base, dict) or not base:
        return {}, [ConfigProblem("base", "The base must be a file of settings, or the settings themselves.")]
    translated, faults = translate(cast("dict[str, Any]", base))
    return translated, faults


def _over(over: Any, search: str) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """The settings that vary: our name → a list of valid values, or {distribution: [low, high]}."""
    if not isinstance(over, dict) or not over:
        return {}, [ConfigProblem("over", "Over must list at least one setting with its values.")]
    found: dict[str, Any] = {}
    faults: list[ConfigProblem] = []
    for key, values in cast("dict[Any, Any]", over).items():
        try:
            found[str(key)] = _range_of(str(key), values, search)
        except UserError as mistake:
            faults += mistake.faults
    return found, faults


def _range_of(key: str, values: Any, search: str) -> list[Any] | dict[str, list[float]]:
    if key not in SETTINGS:
        raise UserError(key, _unknown_key(key, tuple(SETTINGS), "a run"))
    if key in FIXED:
        raise UserError(key, f"{SETTINGS[key].label} cannot vary in a sweep: {FIXED[key]}.")
    if isinstance(values, list) and values:
        valid = [valid_value(key, value) for value in cast("list[Any]", values)]
        if any(value in valid[:index] for index, value in enumerate(valid)):
            raise UserError(key, f"{SETTINGS[key].label} has a value twice.")
        return valid
    if isinstance(values, dict) and len(cast("dict[str, Any]", values)) == 1:
        (kind, bounds), *_ = cast("dict[str, Any]", values).items()
        return {str(kind): _bounds(key, str(kind), bounds, search)}
    raise UserError(
        key, f"{SETTINGS[key].label} must have a list of values, or uniform or log_uniform with two limits."
    )


def _bounds(key: str, kind: str, bounds: Any, search: str) -> list[float]:
    label = SETTINGS[key].label
    if kind not in DISTRIBUTIONS:
        raise UserError(key, _unknown_key(kind, DISTRIBUTIONS, "a random search", what="distribution"))
    if search == "grid":
        raise UserError(
            key, f"{label} has a distribution, which a grid cannot enumerate; list values, or search: random."
        )
    if SETTINGS[key].kind not in ("int", "float"):
        raise UserError(key, f"{label} is no number, so it has no distribution; list its values.")
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        raise UserError(key, f"{label}: {kind} must have two numbers, the lowest and the highest value.") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(key, f"{label}: the lowest value must be below the highest, not {low:g} and {high:g}.")
    if kind == "log_uniform" and low <= 0:
        raise UserError(key, f"{label}: log_uniform needs limits above 0, not {low:g}.")
    return [low, high]


def _numbers(raw: Mapping[str, Any], search: str) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """seeds, trials, search_seed and round_steps."""
    faults: list[ConfigProblem] = []
    seeds = raw.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or not all(_is_count(seed, 0) for seed in cast("list[Any]", seeds)):
        faults.append(ConfigProblem("seeds", "Seeds must be a list of whole numbers, such as [0, 1, 2]."))
    elif len(set(cast("list[int]", seeds))) < len(cast("list[int]", seeds)):
        faults.append(ConfigProblem("seeds", "A seed is listed twice; the same seed gives the same run."))
    trials: Any = raw.get("trials")
    if search == "random" and not _is_count(trials, 1):
        faults.append(ConfigProblem("trials", "A random search needs trials, the number of configurations to draw."))
    elif search == "random" and trials > MOST_RUNS:
        faults.append(
            ConfigProblem(
                "trials", f"There are {quote(trials)} trials; at most {MOST_RUNS} configurations can be trained."
            )
        )
    if search == "grid" and trials is not None:
        faults.append(ConfigProblem("trials", "Trials go with search: random; a grid has every combination."))
    search_seed, round_steps = raw.get("search_seed", 0), raw.get("round_steps", ROUND_STEPS)
    if not _is_count(search_seed, 0):
        faults.append(ConfigProblem("search_seed", "The search seed must be a whole number."))
    if not _is_count(round_steps, 1):
        faults.append(ConfigProblem("round_steps", "Round steps must be a whole number of at least 1."))
    return {"seeds": seeds, "trials": trials, "search_seed": search_seed, "round_steps": round_steps}, faults


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _halving(raw: Any) -> tuple[Halving | None, list[ConfigProblem]]:
    if raw in (None, False, "off"):  # YAML 1.1 reads off as false
        return None, []
    if not isinstance(raw, dict):
        return None, [ConfigProblem("halving", "Halving must be off, or have first_rung and keep.")]
    values = cast("dict[str, Any]", raw)
    faults = [
        ConfigProblem("halving", _unknown_key(str(key), HALVING_KEYS, "halving"))
        for key in values
        if key not in HALVING_KEYS
    ]
    first, keep = values.get("first_rung"), values.get("keep", 0.5)
    if not _is_count(first, 1):
        faults.append(ConfigProblem("halving", "first_rung must be the number of steps before the first are given up."))
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep < 1:
        faults.append(
            ConfigProblem(
                "halving", f"keep must be the share that goes on, above 0 and below 1 such as 0.5, not {quote(keep)}."
            )
        )
    return (None, faults) if faults else (Halving(cast("int", first), float(keep)), [])


def _unknown_key(key: str, known: tuple[str, ...], of: str, what: str = "key") -> str:
    near = nearest(key, list(known))
    return f"There is no {what} {quote(key, 40)} in {of}." + (f" Did you mean {near}?" if near else "")


def _configurations(
    over: Mapping[str, Any], search: str, trials: int | None, search_seed: int
) -> tuple[Configuration, ...]:
    """Raises UserError where there are too many, or fewer than `trials`."""
    if search == "grid":
        count = math.prod(len(values) for values in over.values())
        if count > MOST_RUNS:
            raise UserError("over", f"The grid has {count:,} configurations; at most {MOST_RUNS} can be trained.")
        chosen = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    else:
        chosen = list(itertools.islice(_draws(over, search_seed, trials or 0), trials))
        if len(chosen) < (trials or 0):
            raise UserError("trials", f"There are only {len(chosen)} different configurations; lower trials to that.")
    return tuple(Configuration(number, settings) for number, settings in enumerate(chosen, 1))


def _draws(over: Mapping[str, Any], search_seed: int, trials: int) -> Iterator[dict[str, Any]]:
    """Different configurations; the first n are the same for any number of trials."""
    chance, seen = random.Random(f"sweep {search_seed}"), set[str]()
    for _ in range(DRAWS_PER_TRIAL * trials):
        drawn = {key: _draw(key, values, chance) for key, values in over.items()}
        if repr(drawn) not in seen:
            seen.add(repr(drawn))
            yield drawn


def _draw(key: str, values: Any, chance: random.Random) -> Any:
    if isinstance(values, list):
        return chance.choice(cast("list[Any]", values))
    ((kind, (low, high)),) = cast("dict[str, list[float]]", values).items()
    value = (
        math.exp(chance.uniform(math.log(low), math.log(high))) if kind == "log_uniform" else chance.uniform(low, high)
    )
    # Four digits, so that a table shows the value that was used.
    return round(value) if SETTINGS[key].kind == "int" else float(f"{value:.4g}")


def _check_plan(plan: SweepPlan) -> None:
    """Check every run's settings, and that halving finds what it needs. Raises UserError with every fault."""
    members = plan.members()
    if len(members) > MOST_RUNS:
        raise UserError("seeds", f"The sweep has {len(members):,} runs; at most {MOST_RUNS} can be trained.")
    faults: dict[ConfigProblem, None] = {}
    of_base = problems(plan.base)
    faults |= dict.fromkeys(_staged_faults(plan))
    for configuration in plan.configurations:
        first = Member(configuration, plan.seeds[0], "")
        raw = plan.raw_settings(first)
        for fault in [*problems(raw), *_sweep_faults(raw)]:
            told = fault if fault in of_base else _of_configuration(fault, configuration)
            faults[told] = None
    if not faults and plan.halving is not None:
        faults |= dict.fromkeys(_halving_faults(plan, plan.halving))
    if faults:
        raise UserError(faults)


def _staged_faults(plan: SweepPlan) -> Iterator[ConfigProblem]:
    """Faults of settings that would not vary in all of a run, because its stages replace them."""
    stages: Any = plan.base.get("stages") if "stages" not in plan.over else None
    entries = cast("list[Any]", stages) if isinstance(stages, list) else []
    mappings = [cast("dict[str, Any]", stage) for stage in entries if isinstance(stage, dict)]
    staged = {key for stage in mappings for key in translate(stage)[0]}
    for key in plan.over:
        if key in staged:
            yield ConfigProblem(
                key, f"The stages of the base have a {SETTINGS[key].label} of their own; vary the stages instead."
            )


def _sweep_faults(raw: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Faults of settings that a run may have by itself."""
    if raw.get("save_only_model") in (True, "true"):
        sentence = "A run of a sweep waits at a checkpoint for its turn, which needs the optimizer; turn this off."
        yield ConfigProblem("save_only_model", sentence)


def _of_configuration(fault: ConfigProblem, configuration: Configuration) -> ConfigProblem:
    where = f"Configuration {configuration.number} ({quote(configuration.label, LABEL)}): "
    return ConfigProblem(fault.setting, where + cut_in_the_middle(fault.sentence, SENTENCE - len(where)))


def _halving_faults(plan: SweepPlan, halving: Halving) -> Iterator[ConfigProblem]:
    every, steps = plan.steps_per_eval, plan.steps
    if "steps_per_eval" in plan.over:
        yield ConfigProblem(
            "steps_per_eval", "Eval cannot vary with halving: all configurations are compared at the same steps."
        )
    elif steps is None:
        yield ConfigProblem(
            "halving", "Halving needs runs of a given length; set Iterations, and neither Epochs nor stages."
        )
    elif not every:
        yield ConfigProblem(
            "halving", "Halving compares held-out rewards, and Eval is 0; set Eval to the first rung or less."
        )
    elif halving.first_rung % every:
        yield ConfigProblem(
            "halving",
            f"The first rung, {quote(halving.first_rung)}, is no multiple of Eval, {every}: it has no held-out reward.",
        )
    elif halving.first_rung >= steps:
        yield ConfigProblem(
            "halving", f"The first rung, {quote(halving.first_rung)}, is not below the length of a run, {steps} steps."
        )


def dump_sweep(plan: SweepPlan) -> str:
    """YAML text; loading it gives the same sweep."""
    head = yaml.safe_dump({k: v for k, v in plan.to_dict().items() if k != "base"}, sort_keys=False, allow_unicode=True)
    base = "\n".join(f"  {line}" if line else "" for line in dump(plan.base).splitlines())
    return f"{head}\nbase:\n{base}\n"
