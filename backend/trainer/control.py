"""Commands to a running trainer: pause, resume, save, stop, finish-step, by a signal or the file `control`, which the
trainer claims by renaming it to `control.taken`. A request to change settings is the file `change.json`."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder
from backend.utils.files import open_regular

WORDS = ("pause", "resume", "save", "stop", "finish-step")
LONGEST_WORD = 64
PAUSE_POLL_S = 0.1

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
"""Signals that mean "save and stop". SIGHUP comes when the terminal is closed; SIGXCPU is a batch system's warning."""


def do_nothing() -> None: ...


class Stopped(Exception):
    """Raised out of an interrupted step."""


class StopPending(BaseException):
    """Ends a wait because of a stop, in any thread. Not an Exception, or it would be reported as an error in data."""


def read_word(control: Path) -> str:
    """The command in a control file, which stays there; "" without one."""
    try:
        with open_regular(control) as file:
            return file.read(LONGEST_WORD).decode(errors="replace").strip()
    except OSError:
        return ""


def look_for_stop_word(run: RunFolder) -> None:
    if read_word(run.control) == "stop":
        raise StopPending


class Control:
    """The commands to one run. The trainer clears `save_requested`; the other requests stay set. `looks` are called
    wherever the run may stop, and may raise Stopped; the trainer sets `before_pause`, `after_pause` and `take_change`.
    `keep_words`: obey commands that came before this process."""

    def __init__(self, run: RunFolder, event_log: EventLog, *, keep_words: bool = False) -> None:
        self.run, self.event_log = run, event_log
        self.before_pause = self.after_pause = self.take_change = do_nothing
        self.looks = list[Callable[[], None]]()
        self.save_requested = False
        self.finish_step_requested = False
        self.stop_requested = False
        self.reason = ""
        self.paused_s = 0.0
        self._signal: int | None = None
        self.outer: Any = None  # the commands of a sweep, `SweepCommands`
        if not keep_words:  # a "stop" to an earlier process that did not live to read it would end this one
            self.discard_commands()

    def discard_commands(self) -> None:
        for leftover in (self.run.control, self.run.control_taken, self.run.change_request):
            leftover.unlink(missing_ok=True)

    def listen_to_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            # Only note it: a handler runs between any two bytecodes, so a write to the event log from here could land
            # in the middle of another, and an exception between two updates of the weights.
            self._signal = self._signal or number  # the first is the reason

        on_stop_signals(on_signal)
        unblock_stop_signals()  # `hand_on_signals` of the program before has blocked them

    def hand_on_signals(self) -> None:
        """Before an exec: leave later signals to the next program. Raises Stopped for one that has come already."""
        # Until the exec a signal may reach another thread, whose mask is its own; it becomes a command. The exec keeps
        # this thread's mask, and a signal stays pending until the next program listens.
        on_stop_signals(lambda *_: self.run.say("stop"))
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if self._signal is not None:
            self.listen_to_signals()
            self.obey()

    def look_for_stop(self) -> None:
        """Raises StopPending where a stop has come. Any thread may call it."""
        if self._signal is not None or (self.outer is not None and self.outer.is_stopping()):
            raise StopPending
        look_for_stop_word(self.run)

    def obey_signal(self) -> None:
        if self._signal is not None:
            self.obey()

    def obey(self, *, may_stop: bool = True) -> None:
        """Obey the command that came since the last call, if any. Blocks while paused; raises Stopped for a stop, which
        with may_stop=False waits for the end of the step."""
        if may_stop:
            for look in self.looks:
                look()
        word = self._claim()
        if word == "pause":
            self.pause_until(lambda: False)
        self._request(word)
        # Also for a stop that came while may_stop was False.
        if self.stop_requested and may_stop:
            raise Stopped(self.reason)

    def _request(self, word: str | None) -> None:
        self.save_requested |= word == "save"
        self.finish_step_requested |= word == "finish-step"
        self.stop_requested |= word == "stop"

    def _claim(self) -> str | None:
        if self.run.change_request.exists():
            self.event_log.write("command", word="change")
            self.take_change()
        if self._signal is not None:
            name, self._signal = signal.Signals(self._signal).name, None
            self.event_log.write("command", word="stop", source=name)
            self.reason = f"{name} was received"
            return "stop"
        if self.outer is not None and not self.stop_requested and (word := self.outer.claim()):
            self.event_log.write("command", word=word)
            self.reason = self.outer.stop_reason
            return word
        try:
            self.run.control.rename(self.run.control_taken)
            word = read_word(self.run.control_taken)
            self.run.control_taken.unlink(missing_ok=True)
        except OSError:
            return None
        if word not in WORDS:
            sentence = f"The control word “{word[:40]}” is unknown and was ignored."
            self.event_log.write("note", level="warning", sentence=sentence)
            return None
        self.event_log.write("command", word=word)
        self.reason = "it was asked to stop" if word == "stop" else self.reason
        return word

    def pause_until(self, is_over: Callable[[], bool], why: str = "") -> bool:
        """Pause until `is_over` (→ True) or until a command ends it. `why`: a sentence, where nobody asked for it."""
        self.before_pause()
        self.event_log.write("phase", phase="paused", **({"sentence": why} if why else {}))
        began, word = time.monotonic(), None
        while not (is_past := is_over()) and (word := self._claim()) not in ("resume", "stop", "finish-step"):
            for look in self.looks:
                look()
            self._request(word)  # the trainer saves at the end of the step
            time.sleep(PAUSE_POLL_S)  # a signal does not cut it short (PEP 475); the next poll sees it
        self.paused_s += time.monotonic() - began
        self._request(word)
        self.after_pause()
        return is_past


def on_stop_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Only the main thread may call this."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores it for us
            signal.signal(number, handler)


def unblock_stop_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def handlers_restored() -> Iterator[SimpleNamespace]:
    """Restore every handler after the block; where it sets `process_ends`, ignore stop signals."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    afterwards = SimpleNamespace(process_ends=False)
    try:
        yield afterwards
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if afterwards.process_ends else handler)
