"""Commands to a whole sweep: the words pause, resume and stop in its folder, and the signals that mean stop.

A sweep has no loop of its own to poll in: one of its runs computes nearly all the time, and obeys its own control file within a fraction
of a second. So every command is handed to the run whose turn it is, and a stop is remembered for the others.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType

from backend.run import stop_signals
from backend.run.control import read_word, remove_word
from backend.spec.disk_faults import DiskFault
from backend.spec.run_folder import RunFolder

POLL_S = 0.3


class SweepCommands:
    """`current` is the run whose turn it is, None between turns. `stop_reason` is set for good once a stop has come."""

    def __init__(self, process: RunFolder) -> None:
        self.current: RunFolder | None = None
        self._word = ""
        """Told to a run that may not have read it yet."""
        self.stop_reason = ""
        self._process = process
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sweep commands", daemon=True)
        remove_word(process.control)  # for a process that is no more

    def listen(self) -> None:
        """To be called in the main thread, as `signal.signal` requires."""
        stop_signals.handle(self._on_signal)
        stop_signals.unblock()  # a program before this one may have blocked them (`Control`)
        self._watcher.start()

    def close(self) -> None:
        self._ended.set()
        self._watcher.join()

    def begin_turn(self, run: RunFolder) -> None:
        self.current = run
        if self._word:  # it came between two turns
            run.say(self._word)

    def end_turn(self) -> None:
        run, self.current = self.current, None
        if run is not None and self._word and read_word(run.control) == self._word:
            run.control.unlink(missing_ok=True)  # not read before the turn's end: it is for the next run
        elif self._word != "stop":
            self._word = ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(f"{signal.Signals(number).name} was received")

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            word = read_word(self._process.control)
            with contextlib.suppress(OSError):
                remove_word(self._process.control)
            if word == "stop":
                self._stop("the sweep was asked to stop")
            elif word in ("pause", "resume"):
                self._tell(word)

    def _stop(self, reason: str) -> None:
        self.stop_reason = reason
        self._tell("stop")

    def _tell(self, word: str) -> None:
        self._word = word
        run = self.current
        if run is not None:
            with contextlib.suppress(DiskFault):  # a disk without room for a word: the next run's turn begins with it
                run.say(word)
