"""A sweep as plain data: which runs there are, what their settings are, and when configurations are given up.

Successive halving (Jamieson & Talwalkar, 2016, arXiv:1502.07943): all configurations train to the first rung, the best share `keep`
of them goes on to a rung 1/`keep` times as far, and so on; what is left trains to the end. So each rung costs about the same.

The file is read by `backend.runs.sweeps.sweep_file`, results are in `backend.runs.sweeps.sweep_results`, `backend.trainer.sweep` trains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

from backend.config.config import SETTINGS, parse

ROUND_STEPS = 10
"""Steps that a run takes before the next one has its turn."""


@dataclass(frozen=True, slots=True)
class Halving:
    """After `first_rung` steps the share `keep` of the configurations goes on; then after first_rung / keep steps, and so on."""

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
        """Runs that are trained in turns in one process, on one base model: those with the same model in the same precision. Full
        fine-tuning changes every weight, so that such a run is by itself."""
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
            "name": self.name, "search": self.search, "over": self.over, **random_keys, "seeds": list(self.seeds),
            "halving": self.halving.to_dict() if self.halving else "off", "metric": self.metric,
            "round_steps": self.round_steps, "base": self.base,
        }  # fmt: skip


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
