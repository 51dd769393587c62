"""One run, live or archived: follows its folder in short slices on the event loop and signals what is new."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from app.state.run_completions import CompletionIndex
from app.state.run_files import (
    PresentSettings,
    configured_rewards,
    file_size,
    last_lines,
    log_lines,
    modified_ns,
    newest_checkpoint,
    problem_of,
)
from app.state.run_state import LIVE, Mark, RunState, State
from backend.config.config import read
from backend.runs.archive import STARTUP_GRACE_S, may_be_starting
from backend.runs.completion_rows import GroupRow
from backend.runs.events import Event, Follower
from backend.runs.queue import is_waiting
from backend.runs.run_folder import RunFolder
from backend.runs.start_progress import StartProgress
from backend.utils import file_lock
from backend.utils.errors import UserError
from backend.utils.files import read_regular
from backend.utils.whole_file import replace_file

LIVE_MS, IDLE_MS, BEHIND_MS = 250, 1000, 4
"""Polling intervals: of a live run, of one that has ended, and while there is more to read than one poll takes."""
NEWS_MS, NEWS_BEHIND_MS = 500, 2000
"""Least time between two `changed`, at the end of the event log and before it: drawing takes time too."""
SLICE = 256 << 10
"""Bytes of event log parsed in one go: about 2 ms."""
BUDGET_S, INDEX_BUDGET_S = 0.02, 0.008
"""Seconds that a poll may read before it returns to the event loop, and of that for the index of the completions."""
LOG_END = 4096
"""Bytes at the end of the log that may hold the progress of a start."""
SILENT_S = 300.0
"""A live run that writes nothing for longer is called silent."""
ANSWER_S = 5.0
"""How long a request for control stands: a window that does not answer by then hangs."""


class Run(QObject):
    """A run folder being followed.

    Attributes:
        clock – the present as the run's trainer sees it.
        control – whether this window controls the run, or another.
        present_settings – its settings with every change, and the changes.

    Signals:
        changed – new events were read; emitted about twice a second at most.
        state_changed(str) – the new state, an `app.state.run_state.State`.
        control_changed(bool) – another window controls the run now, or no longer.
        saved(int) – the checkpoint of this step is complete that `send("save")` asked for.
        restarted – a resume cut the event log back: discard everything shown so far.
    """

    changed = Signal()
    state_changed = Signal(str)
    control_changed = Signal(bool)
    restarted = Signal()
    saved = Signal(int)

    def __init__(self, folder: RunFolder, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.folder = folder
        self.present_settings = PresentSettings(folder, lambda: self.config)
        self.clock = RunClock()
        self.control = RunControl(folder)
        self.silence = ""
        """“No sign of life for 5 min.” of a live run that has written nothing for so long."""
        self._run_state = RunState()
        self._follower = Follower(folder.events, limit=SLICE)
        self._index = CompletionIndex(folder.completions)
        self._start_log = StartLog(folder.log)
        self._state: State = "starting"
        self._at_end = False
        self._has_news = False
        self._last_changed = 0.0
        self._stop_requested = self._save_requested = False
        self._expected_until: float | None = None
        self._config: tuple[int, dict[str, Any]] = (-1, {})
        # Everything runs on the GUI thread, in slices of BUDGET_S: no lock is needed, and no page reads half an update.
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.poll)
        self._timer.start(0)  # the first poll comes from the event loop, when the caller has connected to the signals

    def close(self) -> None:
        """Stop following."""
        self._timer.stop()
        self.control.release()

    # State

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_live(self) -> bool:
        return self._state in LIVE

    @property
    def has_caught_up(self) -> bool:
        """The last poll has reached the end of the event log."""
        return self._at_end

    @property
    def step(self) -> int:
        """The newest step whose metrics were read; 0 before the first."""
        return self._run_state.step

    @property
    def iterations(self) -> int | None:
        iterations = self._run_state.iterations or self.config.get("iters")
        return iterations if isinstance(iterations, int) and not isinstance(iterations, bool) else None

    @property
    def phase(self) -> str:
        return self._run_state.phase

    @property
    def pause_reason(self) -> str:
        return self._run_state.pause_reason

    @property
    def phase_progress(self) -> float | None:
        """Share of the phase that is done, 0 to 1, where the trainer reports it."""
        return self._run_state.phase_progress

    @property
    def start_progress(self) -> StartProgress | None:
        """The progress of a live run before its first event."""
        is_newest = self._start_log.written >= (self._run_state.last_t or 0.0)
        return self._start_log.progress if is_newest and self.is_live and self.started is None else None

    @property
    def elapsed_s(self) -> float:
        """Seconds of work."""
        return self._run_state.elapsed_s(self.clock.now() if self.is_live else None)

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds of work left; None while that is unknown, as before the end of the event log."""
        return self._run_state.eta_s(self.clock.now()) if self.is_live and self._at_end else None

    @property
    def started(self) -> Event | None:
        """The `started` event: model, device, versions."""
        return self._run_state.started

    @property
    def ending(self) -> Event | None:
        return self._run_state.ending

    @property
    def read_share(self) -> float | None:
        """Share of the event log read so far, 0 to 1; None at its end."""
        size = file_size(self.folder.events)
        return None if self._at_end or not size else min(1.0, self._follower.offset / size)

    @property
    def notes(self) -> list[Event]:
        return list(self._run_state.notes)

    @property
    def health(self) -> list[Event]:
        return list(self._run_state.health)

    @property
    def problem(self) -> str:
        """Why a failed or crashed run ended."""
        return problem_of(self._state, self.ending, self.step, self.folder)

    def send(self, word: str) -> None:
        """Write a control word (pause, resume, save, stop) for the trainer.

        Raises UserError where that fails, or another window controls the run.
        """
        self._update_control()
        self.control.require()
        self.folder.say(word)
        self._stop_requested = self._stop_requested or word == "stop"
        self._save_requested = self._save_requested or word == "save"
        self.poll()

    def change(self, settings: Mapping[str, Any]) -> None:
        """Ask the trainer to change these raw settings from its next step on. Raises UserError."""
        self._update_control()
        self.control.require()
        self.present_settings.ask(settings, self._state, self.step)

    def take_over(self) -> None:
        """Take the control from the window that has it. Raises UserError."""
        self.control.take_over()
        self.poll()

    def expect_process(self) -> None:
        """A process was just launched for this run: it counts as starting until that process holds the lock."""
        self._stop_requested = False
        self._expected_until = time.monotonic() + STARTUP_GRACE_S
        self.poll()

    # Numbers

    def metric_names(self) -> list[str]:
        return self._run_state.steps.names()

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the newest step, or None before there is one."""
        return self._run_state.steps.span

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps `[n]`, values `[n]` with NaN in gaps), read-only."""
        return self._run_state.steps.get(name)

    def latest(self, name: str) -> float | None:
        return self._run_state.steps.latest(name)

    def first(self, name: str) -> float | None:
        return self._run_state.steps.first(name)

    def eval_metric_names(self) -> list[str]:
        return self._run_state.evals.names()

    def eval_series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """As `series`, of the held-out evaluations."""
        return self._run_state.evals.get(name)

    @property
    def marks(self) -> list[Mark]:
        """Evaluations, checkpoints, changes of settings, health findings and resumes by step."""
        return self._run_state.marks

    @property
    def test_metrics(self) -> dict[str, Any]:
        """Metrics of the test split, measured once at the end."""
        return self._run_state.test_metrics

    @property
    def checkpoint(self) -> int | None:
        """The step of the newest checkpoint; None when a resume would have to start over."""
        return newest_checkpoint(self.folder)

    @property
    def config(self) -> dict[str, Any]:
        """The raw settings of config.yaml."""
        mtime_ns = modified_ns(self.folder.config)
        if mtime_ns != self._config[0]:  # pages ask several times a second; parsing YAML takes milliseconds
            try:
                self._config = (mtime_ns, read(self.folder.config))
            except UserError:
                self._config = (mtime_ns, {})
        return self._config[1]

    @property
    def reward_names(self) -> list[str]:
        """Reward functions in the order of the config, then others in the event log."""
        logged = [
            name.split("/")[1] for name in self.metric_names() if name.startswith("rewards/") and name.count("/") == 2
        ]
        return list(dict.fromkeys([*configured_rewards(self.config), *logged]))

    def log_tail(self, n: int = 200) -> list[str]:
        """The last `n` lines of log.txt."""
        return log_lines(self.folder.log, n)

    def completion_steps(self) -> list[int]:
        return self._index.steps()

    def placed_groups(self, step: int) -> list[tuple[int, GroupRow]]:
        """As `groups`, each with its offset in completions.jsonl."""
        return self._index.placed_rows(step)

    def groups(self, step: int | None = None) -> list[GroupRow]:
        """The rows of completions.jsonl at a step (the newest by default), in the order written."""
        return self._index.rows(step)

    # Following

    def poll(self) -> None:
        """Read new data for at most BUDGET_S, and emit signals."""
        locked = self.folder.is_locked()  # before reading: a trainer writes everything before it releases the lock
        deadline = time.perf_counter() + BUDGET_S
        was_at_end, last_t = self._at_end, self._run_state.last_t
        self._at_end = self._read_event_log(deadline)
        if was_at_end and self._run_state.last_t not in (None, last_t):
            self.clock.hear(self._run_state.last_t or 0.0)
        deadline = min(deadline, time.perf_counter() + INDEX_BUDGET_S)
        more_rows = self._index.advance()
        while more_rows and time.perf_counter() < deadline:
            more_rows = self._index.advance()
        if self._at_end:  # before the end of the event log its state is that of some earlier time
            self._update_state(locked)
            self._update_control()
            self._update_silence()
        # 0.9: Qt's coarse timers fire up to 5 % early, and every second poll would then emit nothing.
        now, least_s = time.monotonic(), (NEWS_MS if self._at_end else NEWS_BEHIND_MS) * 0.9e-3
        if self._has_news and now - self._last_changed >= least_s:
            self._has_news, self._last_changed = False, now
            self.changed.emit()
        behind = not self._at_end or more_rows
        self._timer.setInterval(BEHIND_MS if behind else LIVE_MS if self.is_live else IDLE_MS)

    def _read_event_log(self, deadline: float) -> bool:
        while True:
            position = self._follower.offset
            events = self._follower.read()
            if self._follower.restarted:
                self._run_state = RunState()
                self._index.clear()
                self._stop_requested = False
                self.restarted.emit()
            for event in events:
                self._run_state.apply(event)
                if self._save_requested and event.get("kind") == "checkpoint":
                    self._save_requested = False
                    self.saved.emit(self._run_state.saved_step or 0)
            self._has_news = self._has_news or bool(events)
            if not events and self._follower.offset == position:  # a slice of invalid lines has no events either
                return True
            if time.perf_counter() > deadline:
                return False

    def _update_state(self, locked: bool) -> None:
        may_be_coming = self._may_be_coming(locked)
        if may_be_coming and self._expected_until is not None:
            self._run_state.clear_process()  # what was read so far, an ending perhaps, is the old process's
        state = self._run_state.state(
            is_locked=locked,
            may_be_coming=may_be_coming,
            is_queued=self._run_state.is_empty and not locked and is_waiting(self.folder),
            stop_requested=self._stop_requested,
        )
        if state not in LIVE:
            self._stop_requested = False
        elif self._stop_requested and locked and not self._run_state.stopping:
            self.control.repeat_stop()
        if state in LIVE and self._state not in LIVE:
            self.clock.expect()
        if state in LIVE and self.started is None:
            self._has_news = self._start_log.look() or self._has_news
        if state != self._state:
            self._state = state
            self._has_news = True
            self.state_changed.emit(state)

    def _may_be_coming(self, locked: bool) -> bool:
        if locked:
            self._expected_until = None
        if self._expected_until is not None:
            return time.monotonic() < self._expected_until
        return self._run_state.is_empty and may_be_starting(self.folder)

    def _update_control(self) -> None:
        was_elsewhere = self.control.is_elsewhere
        self.control.update(self.is_live)
        if self.control.is_elsewhere != was_elsewhere:
            self.control_changed.emit(self.control.is_elsewhere)

    def _update_silence(self) -> None:
        is_resumed = self._expected_until is not None  # the last event is an earlier process's
        waits = not self.is_live or self._state == "paused" or is_resumed
        heard = max(self._run_state.last_t or 0.0, self._start_log.written)
        silent_s = 0.0 if waits or not heard else self.clock.silence_s(heard)
        hours, minutes = divmod(int(silent_s // 60), 60)
        duration = f"{hours} h {minutes} min" if hours else f"{minutes} min"
        silence = f"No sign of life for {duration}." if silent_s >= SILENT_S else ""
        self._has_news = self._has_news or silence != self.silence
        self.silence = silence


class StartLog:
    """The end of one log: what a run does before its first event.

    Attributes:
        progress – the progress in its last line, or None.
        written – unix seconds of the last change; 0 where there is no log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self.progress: StartProgress | None = None
        self.written = 0.0

    def look(self) -> bool:
        """Read the log if it has changed; True where its progress is another."""
        try:
            about = os.stat(self._path)
            stamp, self.written = (about.st_mtime_ns, about.st_size), about.st_mtime
        except OSError:
            stamp, self.written = None, 0.0
        if stamp == self._stamp:
            return False
        self._stamp, before = stamp, self.progress
        text = last_lines(self._path, LOG_END).decode(errors="replace")
        last = next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")
        self.progress = StartProgress.read(last)
        return self.progress != before


class RunClock:
    """Unix time as the writer of an event log sees it: its newest event, plus monotonic time since that was read."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._then, self._at = wall(), monotonic()
        self._process_since = float("-inf")

    def expect(self) -> None:
        """A process has just been started for the run: its silence counts from now."""
        self._process_since = self.now()

    def hear(self, t: float) -> None:
        """An event with this unix time has just been written."""
        self._then, self._at = t, self._monotonic()

    def now(self) -> float:
        return self._then + self._monotonic() - self._at

    def silence_s(self, last_t: float) -> float:
        """Seconds since the newest event, at `last_t`."""
        return max(0.0, self.now() - max(last_t, self._process_since))


class RunControl:
    """One window's side of the control of a live run, which the first window has and others may take over.

    Attributes:
        is_elsewhere – another window controls the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._name = f"{os.getpid()}-{id(self)}"
        self._handle: int | None = None
        self._has_asked = False
        self.is_elsewhere = False

    def update(self, live: bool) -> None:
        """Take the control of a live run that no window controls."""
        if not live:
            self.release()
        elif self._handle is not None:
            if self._is_asked_for():
                self._let_go()
                self.is_elsewhere = True
        elif self._is_asked_for():  # it is about to be another's
            self.is_elsewhere = True
        else:
            try:
                self._handle = file_lock.try_hold(self._folder.window_lock)
            except OSError:  # a folder that cannot be written: what is sent to the run then says so itself
                self.is_elsewhere = False
                return
            self.is_elsewhere = self._handle is None
            if self._handle is not None and self._has_asked:
                self._has_asked = False
                self._folder.window_request.unlink(missing_ok=True)

    def take_over(self) -> None:
        """Ask the window that controls the run to give it up; `update` then takes it. Raises DiskError."""
        replace_file(self._folder.window_request, self._name)
        self._has_asked = True

    def require(self) -> None:
        """Raises UserError where another window controls the run."""
        if self.is_elsewhere:
            raise UserError("run", "Another window controls this run. Take over there first.")

    def repeat_stop(self) -> None:
        """Write stop again where it came too early: a starting trainer deletes the control words that it finds."""
        if not (self._folder.control.exists() or self._folder.control_taken.exists()):
            with contextlib.suppress(UserError):  # a disk that is full now: tried again at the next look
                self._folder.say("stop")

    def release(self) -> None:
        """Give the control up."""
        self._let_go()
        self._has_asked = self.is_elsewhere = False

    def _is_asked_for(self) -> bool:
        request = self._folder.window_request
        try:
            age_s = time.time() - request.stat().st_mtime
            return abs(age_s) < ANSWER_S and read_regular(request) != self._name.encode()
        except OSError:
            return False

    def _let_go(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
