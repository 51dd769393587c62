"""The queue as the window sees it: what waits, who runs it, and the runs that it starts. The order is a file (`backend.runs.queue`).

Trainings are started by a detached process, `queue run`, which needs no window; this one starts it where none is alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QFile, QObject, QTimer, Signal

from backend.runs.queue import Queue, QueueFile, is_fresh
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError

POLL_MS = 1000
LAUNCH_S = 15.0
"""How long a runner may take from its start to its lock: it imports first."""


class RunQueue(QObject):
    """The queue of the runs folder, read once a second. A change that is not possible is one sentence of `refused`, and changes nothing.

    Attributes:
        file – the file.
        now – what it says.
        has_runner – whether a process starts the waiting runs.
        problem – why the file cannot be read, one sentence; empty where it can.
        edited – the waiting run whose settings are in the form, or None.

    Signals:
        changed – any of these is another now.
        started(RunFolder) – a run that waited is being started.
        refused(str) – why a change was not possible.
    """

    changed = Signal()
    started = Signal(object)
    refused = Signal(str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.file = QueueFile()
        self.now = Queue()
        self.has_runner = False
        self.problem = ""
        self.edited: RunFolder | None = None
        self._launched_until: float | None = None
        self._timer = QTimer(self, interval=POLL_MS)
        self._timer.timeout.connect(self.refresh)
        self._timer.start()
        self.refresh()

    @property
    def waiting(self) -> tuple[RunFolder, ...]:
        return self.now.waiting

    @property
    def is_active(self) -> bool:
        """Whether a run of the queue is being trained, or the next begins by itself."""
        has_runner = self.has_runner or self._is_launching()
        return has_runner and not self.now.is_paused and bool(self.waiting or self.now.starting)

    def _is_launching(self) -> bool:
        """Whether a runner was just started that does not hold its lock yet."""
        return self._launched_until is not None and time.monotonic() < self._launched_until

    def refresh(self) -> None:
        """Read the file."""
        before, started_before = (self.now, self.has_runner, self.problem), self.now.starting
        try:
            self.now, self.problem = self.file.read(), ""
        except UserError as mistake:
            self.now, self.problem = Queue(), mistake.faults[0].sentence
        self.has_runner = self.file.has_runner()
        if self.has_runner:
            self._launched_until = None
        if self.edited is not None and self.edited not in self.waiting:
            self.stop_editing()
        if (self.now, self.has_runner, self.problem) != before:
            self.changed.emit()
        if self.now.starting is not None and self.now.starting != started_before:
            self.started.emit(self.now.starting)

    # ── changes ─────────────────────────────────────────────────────────────────────────────────

    def add(self, run: RunFolder) -> bool:
        """Let a run wait that is to begin or go on, and see to it that somebody runs the queue; returns whether it waits."""
        return self._change(self.file.add, run) and self.ensure_runner()

    def move(self, run: RunFolder, place: int) -> None:
        self._change(self.file.move, run, place)

    def remove(self, run: RunFolder) -> None:
        """Take a run out of the queue. The folder of one that has never begun goes to the desktop's trash; any other is a run."""
        is_new = is_fresh(run)
        if self._change(self.file.remove, run) and is_new and not QFile.moveToTrash(str(run.path)):
            self.refused.emit(f"{run.path} could not be moved to the trash.")

    def set_paused(self, paused: bool) -> None:
        if self._change(self.file.set_paused, paused):
            self.ensure_runner()

    def set_pauses_after_failure(self, pauses: bool) -> None:
        self._change(self.file.set_pauses_after_failure, pauses)

    def ensure_runner(self) -> bool:
        """Start the process that runs the queue, where runs wait and none is alive. Returns False where it cannot be started."""
        from app.state.processes import (
            start_queue_runner,  # as in Session: the window opens without the means to start one
        )

        self.refresh()
        if self.has_runner or self._is_launching() or self.now.is_paused or not self.waiting:
            return True
        try:
            start_queue_runner(self.file)
        except UserError as mistake:
            self.refused.emit(mistake.faults[0].sentence)
            return False
        self._launched_until = time.monotonic() + LAUNCH_S
        self.changed.emit()
        return True

    # ── the settings of a run that waits ────────────────────────────────────────────────────────

    def edit(self, run: RunFolder) -> None:
        """From now on the form holds this run's settings, until they are kept or given up."""
        self.edited = run
        self.changed.emit()

    def keep_settings(self, text: str) -> bool:
        """Write the form's settings back to the run; returns whether that was possible."""
        run = self.edited
        kept = run is not None and self._change(self.file.rewrite_settings, run, text)
        self.stop_editing()
        return kept

    def stop_editing(self) -> None:
        if self.edited is not None:
            self.edited = None
            self.changed.emit()

    def _change(self, change: Callable[..., object], *arguments: Any) -> bool:
        try:
            change(*arguments)
        except UserError as mistake:
            self.refused.emit(mistake.faults[0].sentence)
            return False
        finally:
            self.refresh()
        return True
