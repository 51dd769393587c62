"""Words from outside: pause, resume, save, stop, from the window's `control` file or from a signal.

The trainer asks between bursts of decoding, micro-batches and evaluation batches. A word is claimed by renaming its
file, so that it is obeyed once, and noted in the diary.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from backend.spec.events import Diary
from backend.spec.places import RunFolder

WORDS = ("pause", "resume", "save", "stop")
PAUSE_POLL_S = 0.1


class Stopped(Exception):
    """Unwinds to the last finished step, which is then saved."""


class Control:
    """Listens for one run. `save_wanted` and `stop_wanted` stay set until the trainer has seen to them."""

    def __init__(self, run: RunFolder, diary: Diary) -> None:
        self.run = run
        self.diary = diary
        self.save_wanted = False
        self.stop_wanted = False
        self.reason = ""
        self.paused_s = 0.0
        """Seconds spent paused so far."""
        self._signal: int | None = None
        for leftover in (run.control, run.control_taken):
            leftover.unlink(missing_ok=True)

    def listen_to_signals(self) -> None:
        """SIGTERM and SIGINT mean save and stop. Only the main thread may ask for this."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def obey(self, *, may_stop: bool = True, resting: Callable[[], None] = lambda: None) -> None:
        """Do what was asked since the last look. Pauses here; raises Stopped when asked to stop and `may_stop`.

        Between the updates of a rollout the weights are half-way, so the trainer passes may_stop=False there and the
        stop waits for the end of the step. `resting` is called once before a pause (to give memory back).
        """
        word = self._take()
        if word == "pause":
            self._pause(resting)
        elif word == "save":
            self.save_wanted = True
        elif word == "stop":
            self.stop_wanted = True
        if self.stop_wanted and may_stop:
            raise Stopped(self.reason)

    def _take(self) -> str | None:
        if self._signal is not None:
            name, self._signal = signal.Signals(self._signal).name, None
            self.diary.write("command", word="stop", source=name)
            self.reason = f"{name} was received"
            return "stop"
        try:
            self.run.control.rename(self.run.control_taken)
            word = self.run.control_taken.read_text(encoding="utf-8", errors="replace").strip()
            self.run.control_taken.unlink()
        except OSError:
            return None
        if word not in WORDS:
            self.diary.write(
                "note", level="warning", sentence=f"The control word “{word[:40]}” is not known and was left out."
            )
            return None
        self.diary.write("command", word=word)
        self.reason = "it was asked to stop" if word == "stop" else self.reason
        return word

    def _pause(self, resting: Callable[[], None]) -> None:
        resting()
        self.diary.write("phase", phase="paused")
        began = time.monotonic()
        while (word := self._take()) not in ("resume", "stop"):
            self.save_wanted |= word == "save"
            time.sleep(PAUSE_POLL_S)
        self.paused_s += time.monotonic() - began
        self.stop_wanted |= word == "stop"
