"""The sweeps of this machine, and the one that is looked at: results as its process writes them, and commands to it.

The process is detached, as a run's: it outlives the window, and everything is read from the sweep's folder.
"""

from __future__ import annotations

from PySide6.QtCore import QObject, QTimer, Signal

from app.state.processes import start_detached
from backend.runs.sweeps.sweep import SweepPlan
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
"""How many times in a row a sweep that was just started may be without its process: it imports first."""
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
        """Train the winner's best run on, as a new run of twice the length; a process of its own makes and starts it."""
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
