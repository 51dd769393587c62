"""The sweeps of this machine, and the form of a new one."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import QObject, QTimer, Signal

from app.state.draft import quarter_of
from app.state.messages import problems_to
from app.state.processes import start_detached
from backend.config.config import SETTINGS
from backend.config.setting import Setting
from backend.runs.sweep import FIXED, SweepPlan, parse_sweep
from backend.runs.sweep_results import (
    INTERRUPTED,
    SweepFolder,
    SweepResults,
    all_sweeps,
    make_sweep,
    read_results,
    shown_state,
    sweep_folder,
)
from backend.utils.command import backend_command

STARTING_CHECKS = 30  # times in a row that a new sweep may be without its process: it imports first
RESUMABLE = ("stopped", "failed", INTERRUPTED)


def free_name(name: str) -> str:
    """`name`, with a number where there is a sweep of that name."""
    stem = name.rstrip("0123456789").rstrip("-")
    names = (name, *(f"{stem}-{number}" for number in range(2, 1000)))
    return next((each for each in names if not sweep_folder(each).path.exists()), name)


class Sweeps(QObject):
    """The sweep that is shown (`folder`, `results`, `state`). `told`: something could not be done."""

    changed = Signal()
    told = Signal(str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.folder: SweepFolder | None = None
        self.results: SweepResults | None = None
        self.state = ""
        self._starting = 0
        self._timer = QTimer(self, interval=1000)
        self._timer.timeout.connect(self.refresh)

    def names(self) -> list[str]:
        return [folder.name for folder in all_sweeps()]

    def watch(self, on: bool) -> None:
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
        if self.folder is None:
            self.changed.emit()
            return
        with problems_to(self.told.emit):
            results = read_results(self.folder)
            state = shown_state(self.folder, results) if results is not None else ""
            if results != self.results:  # its process has begun
                self._starting = 0
            elif state in RESUMABLE and self._starting:
                self._starting -= 1
                state = "starting"
            if (results, state) != (self.results, self.state):
                self.results, self.state = results, state
                self.changed.emit()

    @property
    def is_live(self) -> bool:
        return self.state in ("starting", "running")

    def start(self, plan: SweepPlan) -> bool:
        """Make the sweep's folder and start its process; False if that failed."""
        with problems_to(self.told.emit):
            return self._launch(make_sweep(plan))
        return False

    def resume(self) -> None:
        if self.folder is not None:
            with problems_to(self.told.emit):
                self._launch(self.folder)

    def _launch(self, folder: SweepFolder) -> bool:
        start_detached(backend_command("sweep", str(folder.path), "--resume"), folder)
        self.show(folder.name)
        self._starting, self.state = STARTING_CHECKS, "starting"
        self.changed.emit()
        return True

    def stop(self) -> None:
        if self.folder is not None and self.is_live:
            with problems_to(self.told.emit):
                self.folder.say("stop")
                self.told.emit(f"{self.folder.name} saves its runs and stops.")

    def clone_winner(self) -> None:
        """Continue the winner's best run to twice its length, as a new run."""
        best = self.results.best_run(self.results.winner) if self.results is not None else None
        if best is None or self.folder is None:
            return
        command = backend_command(
            "clone", str(self.folder.run(best.run).path), "--warm", "--set", f"iters={2 * best.step}", "--start"
        )
        with problems_to(self.told.emit):
            start_detached(command, self.folder)
            self.told.emit(f"{best.run} goes on in a new run, up to step {2 * best.step}. It is on Runs in a moment.")


KINDS = ("int", "float", "bool", "choice")
USEFUL = ("learning_rate", "beta", "temperature", "group_size", "rank", "scale", "epsilon", "grpo_loss_type")
OWN = {"run_name", "lm_studio_name"}


@dataclass(frozen=True, slots=True)
class SweepForm:
    name: str = "sweep"
    search: str = "grid"
    varied: tuple[tuple[str, str, str], ...] = (("learning_rate", "1e-5, 3e-5, 1e-4", "list"),)
    """Key, text and draw: list, uniform or log_uniform."""
    seeds: str = "0, 1, 2"
    trials: str = "8"
    halves: bool = True
    first_rung: str = ""
    keep: str = "0.5"
    rank_by: str = "held_out"

    def first_step(self, base: Mapping[str, Any]) -> str:
        """The first rung where none is given: the first evaluation, or a quarter of the run."""
        every = base.get("steps_per_eval")  # a text while the field holds no number
        if isinstance(every, int) and every > 0:
            return str(every)
        return str(quarter_of(base)) if self.rank_by == "training" else ""

    def plan(self, base: Mapping[str, Any]) -> SweepPlan:
        """The sweep over a base's settings. Raises UserError with every problem."""
        is_random, over = self.search == "random", dict[str, Any]()
        for key, text, draw in self.varied:
            words = [_value(word, int, float) for word in text.replace("…", ",").split(",") if word.strip()]
            over[key] = {draw: words} if is_random and draw != "list" else words
        raw: dict[str, Any] = {
            "name": self.name.strip(),
            "search": self.search,
            "over": over,
            "seeds": [_value(word, int) for word in self.seeds.split(",") if word.strip()],
            "base": {key: value for key, value in base.items() if key not in OWN},
            "rank_by": self.rank_by,
        }
        if is_random:
            raw["trials"] = _value(self.trials, int)
        if self.halves:
            first = self.first_rung.strip() or self.first_step(base) or "1"  # Eval is at fault, and told of below
            raw["halving"] = {"first_rung": _value(first, int), "keep": _value(self.keep, float)}
        return parse_sweep(raw)


def _value(text: str, *kinds: type[int | float]) -> Any:
    for kind in kinds:
        with suppress(ValueError):
            return kind(text)
    return text.strip()


def offered_settings() -> list[Setting]:
    useful = [SETTINGS[key] for key in USEFUL]
    others = [about for about in SETTINGS.values() if about.kind in KINDS and about.key not in {*FIXED, *USEFUL}]
    return useful + others
