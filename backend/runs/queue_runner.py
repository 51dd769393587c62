"""The process that trains the waiting runs, one after the other: `queue run`. Killed, it leaves a training that
continues and a queue in which nothing is missing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from backend.runs.archive import training_run
from backend.runs.queue import Queue, QueueFile, is_fresh
from backend.runs.run_folder import RunFolder
from backend.utils.child_process import start_beside
from backend.utils.command import backend_command

POLL_S = 1.0
GOOD_ENDINGS = (0, 3)  # finished, stopped on request (`backend.cli.common`)

Reason = Literal["empty", "paused"]


def train_in_process(run: RunFolder) -> int:
    """Train a prepared run, or resume one that has begun, in a process of its own session, which survives Ctrl-C and
    the runner; returns its exit code, below 0 for a signal."""
    verb = ("train", "--run") if is_fresh(run) else ("resume",)
    with run.log.open("ab") as log:
        trainer = start_beside(backend_command(*verb, str(run.path)), run.path, log)
    return trainer.wait()


class QueueRunner:
    """Trains the runs that wait in `queue` and passes messages to `say`."""

    def __init__(
        self, queue: QueueFile, say: Callable[[str], None], train: Callable[[RunFolder], int] = train_in_process
    ) -> None:
        self.queue, self._say, self._train = queue, say, train

    def run(self) -> Reason:
        """Train until the queue is empty or paused; returns which. Raises UserError where another process runs the
        queue, or its file is broken."""
        lock: int | None = self.queue.hold_runner_lock()
        reason: Reason = "empty"

        def give_up(queue: Queue) -> None:
            nonlocal lock, reason
            reason = "paused" if queue.waiting else "empty"
            if lock is not None:
                os.close(lock)
                lock = None

        try:
            while True:
                waits_for: Path | None = None
                while self.queue.read().waiting and (other := training_run(self.queue.folder)) is not None:
                    if other.path != waits_for:
                        waits_for = other.path
                        self._say(f"Waits for {other.name}, which is training.")
                    time.sleep(POLL_S)
                run = self.queue.start_next(give_up)
                if run is None:
                    return reason
                self._say(f"{run.name} begins.")
                self._note_end(run, self._train(run))
        finally:
            if lock is not None:
                os.close(lock)

    def _note_end(self, run: RunFolder, code: int) -> None:
        is_held = run.is_locked()  # another process trains it: this one was refused, and that is no failure
        self.queue.settle(run)
        if is_held:
            return
        if code in GOOD_ENDINGS:
            self._say(f"{run.name} has {'finished' if code == 0 else 'stopped'}.")
            return
        if code == -signal.SIGKILL:
            hint = "a smaller Group or Completion helps. It goes on from its last checkpoint."
            self._say(f"{run.name} was killed, as a system does that runs out of memory: {hint}")
        else:
            self._say(f"{run.name} failed{f' (signal {-code})' if code < 0 else ''}; its log tells why.")
        if self.queue.read().pauses_after_failure:
            self.queue.set_paused(True)
            self._say("The queue is paused, as after every failure.")
