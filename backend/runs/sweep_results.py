"""A sweep's folder, `<runs>/sweeps/<name>/`, with sweep.yaml, results.json (a line for each configuration, written by
the process that trains), run.lock, control and log.txt. The runs are ordinary run folders beside `sweeps/`."""

import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from backend.config.config import dump, parse, read
from backend.runs.events import read_events
from backend.runs.run_folder import Entry, RunFolder, make_run_folder, modified_at
from backend.runs.sweep import RANKS, RankBy, SweepPlan, dump_sweep, load_sweep
from backend.utils.disk import replace_file, writing
from backend.utils.documents import read_json
from backend.utils.errors import UserError
from backend.utils.files import is_file, is_folder_name, make_private_folder, user_path
from backend.utils.places import runs_folder
from backend.utils.text import about_path

RunState = Literal["waiting", "training", "given up", "finished", "stopped", "failed"]
MEMBER_STATES = {"given up": "stopped early"}  # as users read them, where the file has another word
SweepState = Literal["waiting", "running", "finished", "stopped", "failed"]
INTERRUPTED = "interrupted"  # the state of a sweep whose process has died
_ADVICE = "fix or delete it, and resume the sweep"


@dataclass(frozen=True, slots=True)
class SweepFolder(RunFolder):
    """The process that trains has the lock, control word and log of a run."""

    plan = Entry("sweep.yaml")
    results = Entry("results.json")

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.path.parent.parent / name)


def sweep_folder(name: str, runs: Path | None = None) -> SweepFolder:
    return SweepFolder((runs or runs_folder()) / "sweeps" / name)


def all_sweeps() -> Iterator[SweepFolder]:
    plans = (runs_folder() / "sweeps").glob("*/sweep.yaml")
    yield from (SweepFolder(plan.parent) for plan in sorted(plans, key=modified_at, reverse=True))


def find_sweep(name: str | Path, runs: Path | None = None) -> SweepFolder | None:
    """A sweep by path or by name; None where there is none."""
    candidates = (SweepFolder(user_path(str(name), "sweep")), sweep_folder(str(name), runs))
    return next((SweepFolder(each.path.resolve()) for each in candidates if is_file(each.plan)), None)


def make_sweep(plan: SweepPlan, runs: Path | None = None) -> SweepFolder:
    """A folder for a new sweep, with sweep.yaml inside. Raises UserError where the name is taken."""
    folder = sweep_folder(plan.name, runs)
    require_free_name(plan, folder)
    with writing(folder.path):
        make_private_folder(folder.path)
    replace_file(folder.plan, dump_sweep(plan))
    write_results(folder, fresh_results(plan))
    return folder


def require_free_name(plan: SweepPlan, folder: SweepFolder) -> None:
    taken = next((member.run for member in plan.members() if folder.run(member.run).path.exists()), None)
    # Without a visible entry it is what a process left that was killed before it had written the plan.
    is_there = folder.path.exists() and any(folder.path.glob("[!.]*"))
    if is_there or taken:
        what = f"sweep {plan.name}" if is_there else f"run {taken}"
        raise UserError("name", f"The {what} exists already; resume the sweep, or choose another name.")


def make_runs(plan: SweepPlan, folder: SweepFolder) -> None:
    """Make a folder with config.yaml for every run that has none yet. Raises UserError."""
    for member in plan.members():
        if not folder.run(member.run).config.exists():
            run = make_run_folder(member.run, folder.path.parent.parent, reuse=True)
            replace_file(run.config, dump(parse(plan.raw_settings(member)), plan.origin))


def settings_of_runs(folder: SweepFolder) -> list[dict[str, Any]]:
    """The raw settings of every run, by the plan and by the existing config.yaml files. Raises UserError."""
    plan = load_sweep(folder.plan)
    made = [folder.run(member.run).config for member in plan.members()]
    return [*plan.every_settings(), *(read(config) for config in made if config.is_file())]


@dataclass(slots=True)
class MemberResult:
    """One run. `value`: the metric that the sweep ranks by, at step `evaluated`. `completions`: with evaluations'."""

    run: str
    seed: int
    state: RunState = "waiting"
    step: int = 0
    value: float | None = None
    evaluated: int | None = None
    completions: int = 0
    sentence: str = ""


@dataclass(slots=True)
class ConfigurationResult:
    number: int
    settings: dict[str, Any]
    runs: list[MemberResult]

    @property
    def value(self) -> float | None:
        """The mean over seeds; None before every seed has been evaluated, or where one failed."""
        values = [run.value for run in self.runs if run.state != "failed" and run.value is not None]
        return statistics.fmean(values) if len(values) == len(self.runs) else None

    @property
    def sd(self) -> float | None:
        """Standard deviation over seeds, with n − 1; None for one seed, or without a mean."""
        values = [run.value for run in self.runs if run.value is not None]
        return statistics.stdev(values) if self.value is not None and len(values) > 1 else None

    @property
    def step(self) -> int:
        return min(run.step for run in self.runs)

    @property
    def completions(self) -> int:
        return sum(run.completions for run in self.runs)

    @property
    def state(self) -> RunState:
        states = {run.state for run in self.runs}
        order: tuple[RunState, ...] = ("failed", "training", "stopped", "given up", "waiting", "finished")
        if states == {"waiting", "finished"}:
            return "training"
        return next(state for state in order if state in states)


@dataclass(slots=True)
class RungResult:
    step: int
    kept: list[int]


@dataclass(slots=True)
class SweepResults:
    name: str
    metric: str
    configurations: list[ConfigurationResult]
    state: SweepState = "waiting"
    sentence: str = ""
    rungs: list[RungResult] = field(default_factory=list[RungResult])
    began: float = 0.0
    updated: float = 0.0
    notes: list[str] = field(default_factory=list[str])
    rank_by: RankBy = "held_out"

    @property
    def measure(self) -> str:
        return RANKS[self.rank_by].format(self.metric)

    @property
    def alive(self) -> list[ConfigurationResult]:
        kept = self.rungs[-1].kept if self.rungs else [each.number for each in self.configurations]
        return [each for each in self.configurations if each.number in kept]

    @property
    def winner(self) -> ConfigurationResult | None:
        best = self.ranked[0]
        return best if self.state == "finished" and best.value is not None else None

    @property
    def ranked(self) -> list[ConfigurationResult]:
        """Best first: by the last rung, then by value, those without one last."""
        last = {number: index for index, rung in enumerate(self.rungs, 1) for number in rung.kept}
        sign = sign_of(self.metric)

        def order(each: ConfigurationResult) -> tuple[float, ...]:
            worse = math.inf if each.value is None else -sign * each.value
            return -last.get(each.number, 0), worse, each.number

        return sorted(self.configurations, key=order)

    @property
    def completions(self) -> int:
        return sum(each.completions for each in self.configurations)

    def run(self, name: str) -> MemberResult:
        return next(run for each in self.configurations for run in each.runs if run.run == name)

    def best_run(self, each: ConfigurationResult | None) -> MemberResult | None:
        sign, runs = sign_of(self.metric), each.runs if each is not None else ()
        return max(runs, key=lambda run: (run.value is not None, sign * (run.value or 0.0)), default=None)

    def to_dict(self) -> dict[str, Any]:
        rows = [
            asdict(each) | {"mean": each.value, "sd": each.sd, "state": each.state, "completions": each.completions}
            for each in self.configurations
        ]
        winner = self.winner.number if self.winner else None
        return asdict(self) | {"configurations": rows, "completions": self.completions, "winner": winner}


def sign_of(metric: str) -> int:
    """−1 for a loss or divergence, which is best where it is lowest."""
    return -1 if metric.rpartition("/")[2] in ("loss", "divergence") else 1


def fresh_results(plan: SweepPlan) -> SweepResults:
    rows = {each.number: ConfigurationResult(each.number, each.settings, []) for each in plan.configurations}
    for member in plan.members():
        rows[member.configuration.number].runs.append(MemberResult(member.run, member.seed))
    return SweepResults(plan.name, plan.metric, list(rows.values()), rank_by=plan.rank_by)


def write_results(folder: SweepFolder, results: SweepResults) -> None:
    results.updated = time.time()
    replace_file(folder.results, json.dumps(results.to_dict(), ensure_ascii=False, indent=1) + "\n")


def read_results(folder: SweepFolder) -> SweepResults | None:
    """The results as last written; None where there are none. Raises UserError for a damaged file."""
    if not os.path.lexists(folder.results):
        return None
    with suppress(ValidationError):
        results = _RESULTS.validate_python(read_json(folder.results, "sweep", advice=_ADVICE))
        names = [run.run for each in results.configurations for run in each.runs]
        if names and all(map(is_folder_name, names)):
            return results
    raise UserError("sweep", about_path(folder.results, f" holds no results of a sweep; {_ADVICE}."))


_RESULTS = TypeAdapter(SweepResults)


def shown_state(folder: SweepFolder, results: SweepResults) -> str:
    """The sweep's state; INTERRUPTED where it should be running and no process holds its lock."""
    return INTERRUPTED if results.state in ("waiting", "running") and not folder.is_locked() else results.state


def measured(run: RunFolder, metric: str, rank_by: RankBy) -> tuple[int, float] | None:
    """(step, value) of what is ranked by: the last held-out, or the mean over the last quarter. Raises UserError."""
    found: list[tuple[int, float]] = []
    for event in read_events(run.events):
        if event.get("kind") == "step" if rank_by == "training" else event.get("split") == "valid":
            metrics = event.get("metrics") or {}
            name = f"rewards/{metric}/mean" if rank_by == "training" and metric not in metrics else metric
            if name not in metrics:
                known = ", ".join(sorted(metrics))
                where = "A step" if rank_by == "training" else "A held-out evaluation"
                raise UserError("metric", f"{where} has no metric {metric}; there are {known}.")
            if isinstance(value := metrics[name], int | float):
                found.append((event["step"], float(value)))
    if not found or rank_by == "held_out":
        return found[-1] if found else None
    last = found[-1][0]
    return last, statistics.fmean(value for step, value in found if step > last * 3 / 4)
