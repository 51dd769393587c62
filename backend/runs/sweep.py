"""A sweep as plain data, and its YAML file.

Successive halving (Jamieson & Talwalkar, 2016, arXiv:1502.07943): all configurations train to the first rung, the best
share `keep` of them goes on to a rung 1/`keep` times as far, and so on. So each rung costs about the same.
"""

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from backend.config.checks import default_score
from backend.config.config import SETTINGS, dump, parse, problems, read, resolve_paths, valid_value
from backend.config.other_programs.translation import NAMES, read_file, summary, translate
from backend.rewards.catalogue import nearest
from backend.runs.metric_names import EVALUATION, our_name
from backend.utils.documents import validation_error
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.text import SENTENCE, cut_in_the_middle, quote

ROUND_STEPS = 10  # of a run before the next one has its turn
DISTRIBUTIONS = ("uniform", "log_uniform")
FIXED = {  # settings that cannot vary, and why
    "seed": "seeds go under seeds",
    "run_name": "the sweep names its runs",
    "iters": "all runs of a sweep have the same length",
    "epochs": "all runs of a sweep have the same length",
    "lm_studio_name": "one model can have the name",
}
RankBy = Literal["held_out", "training"]
RANKS: dict[str, str] = {"held_out": "held-out {}", "training": "training {} over the last quarter of steps"}
"""Name of the metric that configurations are compared by."""
MOST_RUNS = 500
DRAWS_PER_TRIAL = 200  # random search draws again where it meets a configuration that it has


@dataclass(frozen=True, slots=True)
class Halving:
    """After `first_rung` steps the share `keep` of the configurations goes on; then after first_rung / keep steps, …"""

    first_rung: int
    keep: float


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
    """A sweep of valid settings, by `parse_sweep`. `base`: raw; `origin`: what was made of another program's file."""

    name: str
    base: dict[str, Any]
    search: Literal["grid", "random"]
    over: dict[str, Any]
    seeds: tuple[int, ...]
    configurations: tuple[Configuration, ...]
    halving: Halving | None
    metric: str
    rank_by: RankBy = "held_out"
    trials: int | None = None
    search_seed: int = 0
    round_steps: int = ROUND_STEPS
    origin: str = ""

    def members(self) -> list[Member]:
        digits = len(str(len(self.configurations)))
        return [
            Member(configuration, seed, f"{self.name}-{configuration.number:0{digits}}-seed{seed}")
            for configuration in self.configurations
            for seed in self.seeds
        ]

    def raw_settings(self, member: Member) -> dict[str, Any]:
        return self.base | member.configuration.settings | {"seed": member.seed, "run_name": member.run}

    def every_settings(self) -> list[dict[str, Any]]:
        return [self.base | configuration.settings for configuration in self.configurations]

    def groups(self) -> list[list[Member]]:
        """Runs that take turns on one base model in the same precision; one of full fine-tuning is alone."""
        groups: dict[tuple[str, ...], list[Member]] = {}
        for member in self.members():
            config = parse(self.raw_settings(member))
            base = (config.model, config.quantization, config.dtype, config.device)
            key = (*base, member.run) if config.train_type == "full" else base
            groups.setdefault(key, []).append(member)
        return list(groups.values())

    def rungs(self) -> list[Rung]:
        every = 1 if self.rank_by == "training" else parse(self.base).steps_per_eval
        return rungs(self.halving, len(self.configurations), self.steps or 0, every)

    def total_steps(self, steps: int) -> int:
        """The steps of all runs together, of which each has at most `steps`."""
        total, before, alive = 0, 0, len(self.configurations)
        for rung in [*self.rungs(), Rung(steps, 0)]:
            total += alive * (rung.step - before)
            before, alive = rung.step, rung.keep
        return total * len(self.seeds)

    @property
    def steps(self) -> int | None:
        """The length of every run in steps; None where the dataset decides (`epochs`, `stages`)."""
        config = parse(self.base)
        return None if config.epochs or config.stages else config.iters


KEYS = tuple(field.name for field in fields(SweepPlan) if field.name not in ("configurations", "origin"))


def text_of(value: Any) -> str:
    """“3e-4”, “0.05”, “a+b” of a list."""
    if isinstance(value, float):
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}" if 0 < abs(value) < 1e-2 else f"{value:.4g}"
    if isinstance(value, list):
        return "+".join(map(text_of, value)) or "none"
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


def load_sweep(path: str | Path) -> SweepPlan:
    """The sweep of a YAML file; paths in it are relative to the file. Raises UserError."""
    path = user_path(str(path), "config")
    raw = read(path)
    if isinstance(base := raw.get("base"), str):
        raw["base"] = read(user_path(base, "base", path.parent))
    elif isinstance(base, dict):
        raw["base"] = resolve_paths(path.parent, base)
    if isinstance(over := raw.get("over"), dict):
        for key, values in over.items():
            if isinstance(values, list):
                over[key] = [resolve_paths(path.parent, {key: value})[key] for value in values]
    return parse_sweep({"name": path.stem} | raw)


def dump_sweep(plan: SweepPlan) -> str:
    left_out = ("base", "configurations", "origin", *(("trials", "search_seed") if plan.search == "grid" else ()))
    head = {key: value for key, value in asdict(plan).items() if key not in left_out}
    head |= {"seeds": list(plan.seeds), "halving": head["halving"] or "off"}
    base = "\n".join(f"  {line}" if line else "" for line in dump(plan.base).splitlines())
    return f"{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}\nbase:\n{base}\n"


def parse_sweep(raw: Mapping[str, Any]) -> SweepPlan:
    """The sweep of a raw mapping, whose `base` is a mapping of settings. Raises UserError with every problem."""
    if why := validation_error(raw):
        raise UserError("sweep", f"The sweep {why}.")
    found = [ConfigProblem(str(key), _unknown(str(key), KEYS, "a sweep")) for key in raw if key not in KEYS]
    values: dict[str, Any] = {"name": "sweep", "search": "grid", "seeds": [0], "halving": "off", "rank_by": "held_out"}
    values |= {"trials": None, "search_seed": 0, "round_steps": ROUND_STEPS, **raw}
    name, search, seeds, trials, halving = (values[key] for key in ("name", "search", "seeds", "trials", "halving"))
    base, over, origin = dict[str, Any](), dict[str, Any](), ""
    if isinstance(raw.get("base"), dict) and raw["base"]:
        translation = read_file(raw["base"])
        base, origin = translation.values, summary(translation, "the base")
        found += translation.faults
    else:
        found.append(ConfigProblem("base", "The base must be a file of settings, or the settings themselves."))
    varied = raw["over"] if isinstance(raw.get("over"), dict) else {}
    for key, choices in varied.items():
        try:
            over[str(key)] = _range_of(str(key), choices, search)
        except UserError as error:
            found += error.faults
    metric = raw.get("metric", default_score({"sft_targets": "dataset"} | base))
    # Under the name that evaluations have it by in the event log.
    metric = our_name(metric).removeprefix(EVALUATION) if isinstance(metric, str) else ""
    has_trials = _is_count(trials, 1) and trials <= MOST_RUNS
    are_seeds = isinstance(seeds, list) and bool(seeds) and all(_is_count(seed, 0) for seed in seeds)
    is_single = not are_seeds or len(set(seeds)) == len(seeds)
    is_name = isinstance(name, str) and name and not set(name) & set('/\\:\n\t"') and not name.startswith(".")
    needs = f"A random search needs trials, the number of configurations to draw, from 1 to {MOST_RUNS}."
    only_random = "Trials go with search: random; a grid has every combination."
    rank_by = f"rank_by cannot be {quote(values['rank_by'])}; it is held_out or training."
    checks = (
        ("search", search in ("grid", "random"), f"The search cannot be {quote(search)}; it is grid or random."),
        ("over", varied, "Over must list at least one setting with its values."),
        ("seeds", are_seeds, "Seeds must be a list of whole numbers, such as [0, 1, 2]."),
        ("seeds", is_single, "A seed is listed twice; the same seed gives the same run."),
        ("trials", has_trials or search != "random", needs),
        ("trials", search != "grid" or trials is None, only_random),
        ("search_seed", _is_count(values["search_seed"], 0), "The search seed must be a whole number."),
        ("round_steps", _is_count(values["round_steps"], 1), "Round steps must be a whole number of at least 1."),
        ("metric", metric, "The metric must be the name of a held-out metric, such as reward."),
        ("rank_by", values["rank_by"] in [*RANKS], rank_by),
        ("name", is_name, f"The name {quote(name)} cannot be a folder's name."),
    )
    found += [ConfigProblem(key, sentence) for key, is_right, sentence in checks if not is_right]
    found += _halving_problems(halving)
    if found:
        raise UserError(found)
    halved = Halving(halving["first_rung"], float(halving.get("keep", 0.5))) if isinstance(halving, dict) else None
    values |= {"base": base, "over": over, "seeds": tuple(seeds), "metric": metric, "origin": origin, "halving": halved}
    plan = SweepPlan(**values, configurations=_configurations(over, search, trials, values["search_seed"]))
    _check_plan(plan)
    return plan


def _range_of(key: str, values: Any, search: str) -> list[Any] | dict[str, list[float]]:
    if key not in SETTINGS:
        raise UserError(key, _unknown(key, tuple(SETTINGS), "a run"))
    label = SETTINGS[key].label
    if key in FIXED:
        raise UserError(key, f"{label} cannot vary in a sweep: {FIXED[key]}.")
    if isinstance(values, list) and values:
        valid = [valid_value(key, value) for value in values]
        if any(value in valid[:index] for index, value in enumerate(valid)):
            raise UserError(key, f"{label} has a value twice.")
        return valid
    if not isinstance(values, dict) or len(values) != 1:
        raise UserError(key, f"{label} must have a list of values, or uniform or log_uniform with two limits.")
    ((kind, bounds),) = values.items()
    if kind not in DISTRIBUTIONS:
        raise UserError(key, _unknown(str(kind), DISTRIBUTIONS, "a random search", what="distribution"))
    if search == "grid":
        problem = "has a distribution, which a grid cannot enumerate; list values, or search: random"
        raise UserError(key, f"{label} {problem}.")
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
    return {kind: [low, high]}


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _halving_problems(raw: Any) -> list[ConfigProblem]:
    if raw in (None, False, "off"):  # YAML 1.1 reads off as false
        return []
    if not isinstance(raw, dict):
        return [ConfigProblem("halving", "Halving must be off, or have first_rung and keep.")]
    known = ("first_rung", "keep")
    found = [ConfigProblem("halving", _unknown(str(key), known, "halving")) for key in raw if key not in known]
    if not _is_count(raw.get("first_rung"), 1):
        found.append(ConfigProblem("halving", "first_rung must be the number of steps before the first are stopped."))
    keep = raw.get("keep", 0.5)
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep < 1:
        share = f"keep must be the share that goes on, above 0 and below 1 such as 0.5, not {quote(keep)}."
        found.append(ConfigProblem("halving", share))
    return found


def _unknown(key: str, known: tuple[str, ...], of: str, what: str = "key") -> str:
    near = NAMES[key] if NAMES.get(key) in known else nearest(key, list(known))
    return f"There is no {what} {quote(key, 40)} in {of}." + (f" Did you mean {near}?" if near else "")


def _configurations(
    over: Mapping[str, Any], search: str, trials: int | None, search_seed: int
) -> tuple[Configuration, ...]:
    """Raises UserError. The first n of a random search are the same for any number."""
    if search == "grid":
        count = math.prod(len(values) for values in over.values())
        if count > MOST_RUNS:
            raise UserError("over", f"The grid has {count:,} configurations; at most {MOST_RUNS} can be trained.")
        chosen = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    else:
        chance, drawn = random.Random(f"sweep {search_seed}"), dict[str, dict[str, Any]]()
        for _ in range(DRAWS_PER_TRIAL * (trials or 0)):
            if len(drawn) == trials:
                break
            settings = {key: _draw(key, values, chance) for key, values in over.items()}
            drawn.setdefault(repr(settings), settings)
        chosen = list(drawn.values())
        if len(chosen) < (trials or 0):
            raise UserError("trials", f"There are only {len(chosen)} different configurations; lower trials to that.")
    return tuple(Configuration(number, settings) for number, settings in enumerate(chosen, 1))


def _draw(key: str, values: Any, chance: random.Random) -> Any:
    if isinstance(values, list):
        return chance.choice(values)
    ((kind, (low, high)),) = values.items()
    is_log = kind == "log_uniform"
    value = math.exp(chance.uniform(math.log(low), math.log(high))) if is_log else chance.uniform(low, high)
    # Four digits, so that a table shows the value that was used.
    return round(value) if SETTINGS[key].kind == "int" else float(f"{value:.4g}")


def _check_plan(plan: SweepPlan) -> None:
    members = plan.members()
    if len(members) > MOST_RUNS:
        raise UserError("seeds", f"The sweep has {len(members):,} runs; at most {MOST_RUNS} can be trained.")
    stages: Any = plan.base.get("stages") if "stages" not in plan.over else None
    entries = stages if isinstance(stages, list) else []
    staged = {key for stage in entries if isinstance(stage, dict) for key in translate(stage).values}
    replaced = "The stages of the base have a {} of their own; vary the stages instead."
    found = {ConfigProblem(key, replaced.format(SETTINGS[key].label)): None for key in plan.over if key in staged}
    of_base = problems(plan.base)
    for configuration in plan.configurations:
        raw = plan.raw_settings(Member(configuration, plan.seeds[0], ""))
        of_run = problems(raw)
        if raw.get("save_only_model") in (True, "true"):
            needs = "A run of a sweep waits at a checkpoint for its turn, which needs the optimizer; turn this off."
            of_run = [*of_run, ConfigProblem("save_only_model", needs)]
        for problem in of_run:
            if problem not in of_base:
                where = f"Configuration {configuration.number} ({quote(configuration.label, 50)}): "
                sentence = where + cut_in_the_middle(problem.sentence, SENTENCE - len(where))
                problem = ConfigProblem(problem.setting, sentence)
            found[problem] = None
    if not found:
        # Those of the first configuration with the metric as its best checkpoint's.
        raw = plan.raw_settings(members[0]) | {"steps_per_eval": 1}
        names = [plan.metric, *([f"rewards/{plan.metric}/mean"] if plan.rank_by == "training" else [])]
        tried = [problems(raw | {"best_metric": EVALUATION + name}) for name in names]
        if all(tried):
            found = dict.fromkeys(ConfigProblem("metric", problem.sentence) for problem in tried[0])
    if not found and plan.halving is not None and (problem := _halving_problem(plan, plan.halving)):
        found[problem] = None
    if found:
        raise UserError(list(found))


def _halving_problem(plan: SweepPlan, halving: Halving) -> ConfigProblem | None:
    every, steps, first = parse(plan.base).steps_per_eval, plan.steps, halving.first_rung
    is_held_out = plan.rank_by == "held_out"
    if is_held_out and "steps_per_eval" in plan.over:
        sentence = "Eval cannot vary with halving: all configurations are compared at the same steps."
        return ConfigProblem("steps_per_eval", sentence)
    sentence = ""
    if steps is None:
        sentence = "Halving needs runs of a given length; set Iterations, and neither Epochs nor stages."
    elif is_held_out and every < 1:
        sentence = f"Halving compares held-out rewards, and Eval is {every}; set Eval to the first rung or less."
    elif is_held_out and first % every:
        sentence = f"The first rung, {quote(first)}, is no multiple of Eval, {every}: it has no held-out reward."
    elif first >= steps:
        sentence = f"The first rung, {quote(first)}, is not below the length of a run, {steps} steps."
    return ConfigProblem("halving", sentence) if sentence else None
