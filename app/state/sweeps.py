"""The sweeps of this machine: results as the sweep's detached process writes them, and the form of a new sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from PySide6.QtCore import QObject, QTimer, Signal

from app.state.processes import start_detached
from backend.config.config import SETTINGS
from backend.config.setting import Setting
from backend.runs.sweeps.sweep import FIXED, SweepPlan, parse_sweep, training_steps
from backend.runs.sweeps.sweep_results import (
    INTERRUPTED,
    SweepFolder,
    SweepResults,
    all_sweeps,
    make_sweep,
    read_results,
    shown_state,
)
from backend.utils.command import backend_command
from backend.utils.errors import UserError

EVERY_MS = 1000
"""How often a live sweep is read while it is shown."""
STARTING_CHECKS = 30
"""The number of times in a row a sweep that was just started may be without its process: it imports first."""
RESUMABLE = ("stopped", "failed", INTERRUPTED)


class Sweeps(QObject):
    """Attributes:
        folder, results, state – the sweep that is shown; None, None and "" where there is none.

    Signals:
        changed – any of them has changed.
        told(sentence) – something could not be done.
    """

    changed = Signal()
    told = Signal(str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.folder: SweepFolder | None = None
        self.results: SweepResults | None = None
        self.state = ""
        self._starting = 0
        self._timer = QTimer(self, interval=EVERY_MS)
        self._timer.timeout.connect(self.refresh)

    def names(self) -> list[str]:
        """Every sweep, newest first."""
        return [folder.name for folder in all_sweeps()]

    def watch(self, on: bool) -> None:
        """Follow the sweep that is shown while the page is visible."""
        if on:
            self.refresh()
            self._timer.start()
        else:
            self._timer.stop()

    def show(self, name: str) -> None:
        folder = next((folder for folder in all_sweeps() if folder.name == name), None)
        self.folder, self.results, self.state, self._starting = folder, None, "", 0
        self.refresh()

    def refresh(self) -> None:
        """Read the sweep's folder again."""
        if self.folder is None:
            self.changed.emit()
            return
        try:
            results = read_results(self.folder)
        except UserError as mistake:
            self.told.emit(mistake.faults[0].sentence)
            return
        state = shown_state(self.folder, results) if results is not None else ""
        if state == INTERRUPTED and self._starting:
            self._starting -= 1
            state = "starting"
        elif state:
            self._starting = 0 if state == "running" else self._starting
        if (results, state) != (self.results, self.state):
            self.results, self.state = results, state
            self.changed.emit()

    @property
    def is_live(self) -> bool:
        return self.state in ("starting", "running")

    def start(self, plan: SweepPlan) -> bool:
        """Make the sweep's folder and start its process. → whether that could be done; `told` says why not."""
        try:
            folder = make_sweep(plan)
        except UserError as mistake:
            self.told.emit(mistake.faults[0].sentence)
            return False
        return self._launch(folder)

    def resume(self) -> bool:
        return self.folder is not None and self._launch(self.folder)

    def _launch(self, folder: SweepFolder) -> bool:
        try:
            start_detached(backend_command("sweep", str(folder.path), "--resume"), folder.process)
        except UserError as mistake:
            self.told.emit(mistake.faults[0].sentence)
            return False
        self.show(folder.name)
        self._starting, self.state = STARTING_CHECKS, "starting"
        self.changed.emit()
        return True

    def stop(self) -> None:
        """Ask the sweep to save every run and end."""
        if self.folder is not None and self.is_live:
            try:
                self.folder.process.say("stop")
            except UserError as mistake:
                self.told.emit(mistake.faults[0].sentence)
            else:
                self.told.emit(f"{self.folder.name} saves its runs and stops.")

    def clone_winner(self) -> None:
        """Continue training the winner's best run, as a new run of twice the length in its own process."""
        best = self.results.best_run() if self.results is not None else None
        if best is None or self.folder is None:
            return
        command = backend_command(
            "clone", str(self.folder.run(best.run).path), "--warm", "--set", f"iters={2 * best.step}", "--start"
        )
        try:
            start_detached(command, self.folder.process)
        except UserError as mistake:
            self.told.emit(mistake.faults[0].sentence)
            return
        self.told.emit(f"{best.run} goes on in a new run, up to step {2 * best.step}. It is on Runs in a moment.")


KINDS = ("int", "float", "bool", "choice")
"""Kinds of settings whose values are written on one line."""
USEFUL = ("learning_rate", "beta", "temperature", "group_size", "rank", "scale", "epsilon", "grpo_loss_type")
OWN = {"run_name", "lm_studio_name"}
"""Settings of one run that a sweep's base does not have."""


@dataclass(frozen=True, slots=True)
class VariedSetting:
    """A row: a setting, its values as text, and how a random search draws: list, uniform or log_uniform."""

    key: str
    text: str
    draw: str = "list"

    def values(self) -> list[Any] | dict[str, list[Any]]:
        words = [_value(word) for word in self.text.replace("…", ",").split(",") if word.strip()]
        return words if self.draw == "list" else {self.draw: words}


@dataclass(frozen=True, slots=True)
class SweepForm:
    """What the page's fields hold."""

    name: str = "sweep"
    search: str = "grid"
    varied: tuple[VariedSetting, ...] = (VariedSetting("learning_rate", "1e-5, 3e-5, 1e-4"),)
    seeds: str = "0, 1, 2"
    trials: str = "8"
    halves: bool = True
    first_rung: str = ""
    keep: str = "0.5"

    def plan(self, base: Mapping[str, Any]) -> SweepPlan:
        """The sweep over a base's settings. Raises UserError with every fault."""
        is_random = self.search == "random"
        varied = [row if is_random else replace(row, draw="list") for row in self.varied]
        raw: dict[str, Any] = {
            "name": self.name.strip(),
            "search": self.search,
            "over": {row.key: row.values() for row in varied},
            "seeds": [_whole(word) for word in self.seeds.split(",") if word.strip()],
            "base": {key: value for key, value in base.items() if key not in OWN},
        }
        if is_random:
            raw["trials"] = _whole(self.trials)
        if self.halves:
            first = self.first_rung.strip() or str(base.get("steps_per_eval") or "")
            raw["halving"] = {"first_rung": _whole(first), "keep": _number(self.keep)}
        return parse_sweep(raw)


def _whole(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text.strip()


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text.strip()


def _value(text: str) -> Any:
    whole = _whole(text)
    return whole if isinstance(whole, int) else _number(text)


def offered_settings() -> list[Setting]:
    """The settings that can vary here: useful ones first, the others in the order of the form."""
    useful = [SETTINGS[key] for key in USEFUL]
    others = [about for about in SETTINGS.values() if about.kind in KINDS and about.key not in {*FIXED, *USEFUL}]
    return useful + others


@dataclass(frozen=True, slots=True)
class SweepForecast:
    """What a sweep would take at most; `seconds` and `bytes` are None where they are unknown."""

    runs: int
    configurations: int
    steps: int | None
    completions: int | None
    share: float | None
    seconds: float | None = None
    bytes: float | None = None
    sharing: int = 0
    """Runs on one base model in memory."""
    alone: int = 0
    """Runs that fine-tune every weight, one loaded after the other."""
    rungs: tuple[tuple[int, int], ...] = field(default=())


def forecast(
    plan: SweepPlan, seconds_per_completion: float | None, run_bytes: float | None, own_bytes: float | None
) -> SweepForecast:
    """`run_bytes`: what one run needs in memory; `own_bytes`: the part of it that every run has for itself."""
    runs, configurations = len(plan.members()), len(plan.configurations)
    groups = plan.groups()
    sharing, alone = (
        max(len(group) for group in groups),
        sum(len(group) == 1 for group in groups) if len(groups) > 1 else 0,
    )
    memory = None if run_bytes is None else run_bytes + (sharing - 1) * (own_bytes or 0.0)
    if plan.steps is None:
        return SweepForecast(runs, configurations, None, None, None, None, memory, sharing, alone)
    rungs = plan.rungs()
    steps = training_steps(configurations, len(plan.seeds), plan.steps, rungs)
    completions = steps * completions_per_step(plan.base)
    return SweepForecast(
        runs,
        configurations,
        steps,
        completions,
        steps / (runs * plan.steps),
        None if seconds_per_completion is None else completions * seconds_per_completion,
        memory,
        sharing,
        alone,
        tuple((rung.step, rung.keep) for rung in rungs),
    )


def completions_per_step(base: Mapping[str, Any]) -> int:
    """Of the base: a configuration that varies the group or the batch takes more or fewer."""
    count = 1
    for key in ("group_size", "batch_size", "gradient_accumulation_steps", "steps_per_generation"):
        count *= int(base.get(key, SETTINGS[key].default))
    return count
