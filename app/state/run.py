"""One run, live or archived: follows its folder in short slices on the event loop and signals what is new.

All it knows comes from the event log, the lock and the files beside them, so pages treat a run of this window and one from the archive
alike. It starts no process and writes nothing but control words.
"""

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

# What a run says in its log before its first step: how far its process has come with rows and weights.

READ = 4096
"""Bytes at the end of the log that are looked at, however long it is."""


class StartLog:
    """The end of one log, looked at when the file has changed.

    Attributes:
        progress – what the log's last line says; None where that is another line.
        written – unix seconds of the last change; 0 where there is no log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self.progress: StartProgress | None = None
        self.written = 0.0

    def look(self) -> bool:
        """→ whether the log says something else than at the last look."""
        try:
            about = os.stat(self._path)
            stamp, self.written = (about.st_mtime_ns, about.st_size), about.st_mtime
        except OSError:
            stamp, self.written = None, 0.0
        if stamp == self._stamp:
            return False
        self._stamp, before = stamp, self.progress
        text = last_lines(self._path, READ).decode(errors="replace")
        last = next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")
        self.progress = StartProgress.read(last)
        return self.progress != before


# ── run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

LIVE_MS, IDLE_MS, BEHIND_MS = 250, 1000, 4
"""Polling intervals: of a live run, of one that has ended, and while there is more to read than one poll takes."""
NEWS_MS, NEWS_BEHIND_MS = 500, 2000
"""Least time between two `changed`: at the event log's end, where a run of many steps a second must not keep a core busy with drawing them,
and before it, where drawing would only delay the rest."""
SLICE = 256 << 10
"""Bytes of event log parsed in one go: about 2 ms."""
BUDGET_S = 0.02
"""Time that a poll may read before it returns to the event loop."""
INDEX_BUDGET_S = 0.008
"""Of that, for the index of the completions: nobody waits for all of it, and it may take hundreds of polls."""


class Run(QObject):
    """A run folder being followed.

    Attributes:
        folder – the run folder.
        clock – the present as the run's trainer sees it.
        control – whether this window controls the run, or another.
        present_settings – its settings with every change, and the changes.

    Signals:
        changed – new events were read; emitted about twice a second at most.
        state_changed(str) – the new state, an `app.state.run_state.State`.
        control_changed(bool) – whether another window controls the run now.
        saved(int) – the checkpoint of this step is complete that `send("save")` asked for.
        restarted – a resume cut the event log back, and it is read again from its start: discard everything shown so far.
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
        self._silence = ""
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
        self._reward_names: tuple[Any, list[str]] = (None, [])
        # Everything runs on the GUI thread, in slices of BUDGET_S: no lock is needed, and no page reads half an update.
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.poll)
        self._timer.start(0)  # the first poll comes from the event loop, when the caller has connected to the signals

    def close(self) -> None:
        """Stop following; the trainer is not touched."""
        self._timer.stop()
        self.control.release()

    # ── state ───────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_live(self) -> bool:
        return self._state in LIVE

    @property
    def has_caught_up(self) -> bool:
        """Whether the last poll has reached the end of the event log."""
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
        """What a live run does before its first step; None where the event log has told something since."""
        is_newest = self._start_log.written >= (self._run_state.last_t or 0.0)
        return self._start_log.progress if is_newest and self.is_live and self.started is None else None

    @property
    def elapsed_s(self) -> float:
        """Seconds of work; loading and pauses are not counted."""
        return self._run_state.elapsed_s(self.clock.now() if self.is_live else None)

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds of work left, None while that is unknown, as before the end of the event log."""
        return self._run_state.eta_s(self.clock.now()) if self.is_live and self._at_end else None

    @property
    def silence(self) -> str:
        """“No sign of life for 5 min.” of a live run that has written nothing for so long; otherwise empty."""
        return self._silence

    @property
    def started(self) -> Event | None:
        """The `started` event: model, device, versions."""
        return self._run_state.started

    @property
    def ending(self) -> Event | None:
        return self._run_state.ending

    @property
    def read_share(self) -> float | None:
        """Share of the event log that was read so far, 0 to 1; None at its end. Before that, state and times are those of some
        earlier moment."""
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
        """Why a failed or crashed run ended, as one sentence; empty in any other state."""
        return problem_of(self._state, self.ending, self.step, self.folder)

    def send(self, word: str) -> None:
        """Write a control word (pause, resume, save, stop) for the trainer. Raises UserError where that fails, or another window controls
        the run."""
        self._update_control()
        self.control.require()
        self.folder.say(word)
        self._stop_requested = self._stop_requested or word == "stop"
        self._save_requested = self._save_requested or word == "save"
        self.poll()

    def change(self, settings: Mapping[str, Any]) -> None:
        """Ask the trainer to change these raw settings from its next step on. Raises UserError, as `send` and `PresentSettings.ask`."""
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

    # ── numbers ─────────────────────────────────────────────────────────────────────────────────

    def metric_names(self) -> list[str]:
        """Every metric read so far."""
        return self._run_state.steps.names()

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the newest step, or None before there is one."""
        return self._run_state.steps.span

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps `[n]`, values `[n]` with NaN in gaps), read-only; empty for a metric that never came."""
        return self._run_state.steps.get(name)

    def eval_metric_names(self) -> list[str]:
        return self._run_state.evals.names()

    def eval_series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """As `series`, of the held-out evaluations."""
        return self._run_state.evals.get(name)

    @property
    def marks(self) -> list[Mark]:
        """What happened at which step: evaluations, checkpoints, changes of settings, health findings, resumes."""
        return self._run_state.marks

    @property
    def test_metrics(self) -> dict[str, Any]:
        """Metrics of the test split, measured once at the end; empty where that is off."""
        return self._run_state.test_metrics

    def latest(self, name: str) -> float | None:
        return self._run_state.steps.latest(name)

    def first(self, name: str) -> float | None:
        return self._run_state.steps.first(name)

    @property
    def checkpoint(self) -> int | None:
        """The step of the newest checkpoint; None when a resume would have to start over."""
        return newest_checkpoint(self.folder)

    @property
    def config(self) -> dict[str, Any]:
        """The raw settings of config.yaml; empty while it cannot be read."""
        mtime_ns = modified_ns(self.folder.config)
        if mtime_ns != self._config[0]:  # pages ask several times a second; parsing YAML takes milliseconds
            try:
                self._config = (mtime_ns, read(self.folder.config))
            except UserError:
                self._config = (mtime_ns, {})
        return self._config[1]

    @property
    def reward_names(self) -> list[str]:
        """Reward functions in the order of the config, then those that only the event log names. Their indices are their colours."""
        config, names = self.config, self.metric_names()
        key = (
            self._config[0],
            len(names),
        )  # reading on only adds metrics, so their number tells whether there are new ones
        if key != self._reward_names[0]:
            in_event_log = [
                name.split("/")[1] for name in names if name.startswith("rewards/") and name.count("/") == 2
            ]
            self._reward_names = (key, list(dict.fromkeys([*configured_rewards(config), *in_event_log])))
        return self._reward_names[1]

    def log_tail(self, n: int = 200) -> list[str]:
        """The last `n` lines of log.txt; of a progress line, its last state."""
        return log_lines(self.folder.log, n)

    def completion_steps(self) -> list[int]:
        """Steps that have completions, ascending."""
        return self._index.steps()

    def placed_groups(self, step: int) -> list[tuple[int, GroupRow]]:
        """As `groups`, each with its offset in completions.jsonl."""
        return self._index.placed_rows(step)

    def groups(self, step: int | None = None) -> list[GroupRow]:
        """The rows of completions.jsonl at a step (the newest by default), in the order written; [] for none."""
        return self._index.rows(step)

    # ── following ───────────────────────────────────────────────────────────────────────────────

    def poll(self) -> None:
        """Read new data for at most BUDGET_S, and emit signals. The timer calls it; extra calls do no harm."""
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
        self._emit_changed()
        behind = not self._at_end or more_rows
        self._timer.setInterval(BEHIND_MS if behind else LIVE_MS if self.is_live else IDLE_MS)

    def _read_event_log(self, deadline: float) -> bool:
        """Apply events until the end of the event log or the deadline; returns whether the end was reached."""
        while True:
            position = self._follower.offset
            events = self._follower.read()
            if self._follower.restarted:
                self._start_over()
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

    def _start_over(self) -> None:
        self._run_state.clear()
        self._index.clear()
        self._stop_requested = False
        self.restarted.emit()

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

    def _update_control(self) -> None:
        was_elsewhere = self.control.is_elsewhere
        self.control.update(self.is_live)
        if self.control.is_elsewhere != was_elsewhere:
            self.control_changed.emit(self.control.is_elsewhere)

    def _update_silence(self) -> None:
        is_resumed = self._expected_until is not None  # the last event is an earlier process's
        waits = not self.is_live or self._state == "paused" or is_resumed
        heard = max(self._run_state.last_t or 0.0, self._start_log.written)
        silence = "" if waits else silence_sentence(self.clock.silence_s(heard or None))
        self._has_news = self._has_news or silence != self._silence
        self._silence = silence

    def _may_be_coming(self, locked: bool) -> bool:
        """Whether a process that has written nothing yet may still be starting."""
        if locked:
            self._expected_until = None
        if self._expected_until is not None:
            return time.monotonic() < self._expected_until
        return self._run_state.is_empty and may_be_starting(self.folder)

    def _emit_changed(self) -> None:
        # 0.9: Qt's coarse timers fire up to 5 % early, and every second poll would then emit nothing.
        now, least_s = time.monotonic(), (NEWS_MS if self._at_end else NEWS_BEHIND_MS) * 0.9e-3
        if self._has_news and now - self._last_changed >= least_s:
            self._has_news, self._last_changed = False, now
            self.changed.emit()


SILENT_S = 300.0
"""How long a live run may write nothing before the window says so: longer than most single operations of a step take."""


class RunClock:
    """Unix time as the writer of an event log sees it: that of its newest event, plus what has passed since it was read.

    Passed time is monotonic time, which stands still while the machine sleeps. `wall` and `monotonic` are replaced by tests.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._then, self._at = wall(), monotonic()
        self._process_since = float("-inf")

    def expect(self) -> None:
        """A process has just been started for the run: its silence counts from now, and not from the last event of the one before."""
        self._process_since = self.now()

    def hear(self, t: float) -> None:
        """An event with this unix time has just been written. Not for events that were in the event log when it was opened."""
        self._then, self._at = t, self._monotonic()

    def now(self) -> float:
        return self._then + self._monotonic() - self._at

    def silence_s(self, last_t: float | None) -> float:
        """Seconds since the event at `last_t`, the newest of the event log; 0 where there is none."""
        return max(0.0, self.now() - max(last_t, self._process_since)) if last_t is not None else 0.0


def silence_sentence(silence_s: float) -> str:
    """“No sign of life for 5 min.”; empty below SILENT_S."""
    if silence_s < SILENT_S:
        return ""
    minutes = int(silence_s // 60)
    hours, rest = divmod(minutes, 60)
    return f"No sign of life for {f'{hours} h {rest} min' if hours else f'{minutes} min'}."


ANSWER_S = 5.0
"""How long a request stands: a window that does not answer by then hangs."""


class RunControl:
    """One window's side of it. Call `update` whenever the run is looked at.

    Attributes:
        is_elsewhere – whether another window controls the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._handle: int | None = None
        self._has_asked = False
        self.is_elsewhere = False

    def update(self, live: bool) -> None:
        """Take the control of a live run that no window controls; give it up where another asks for it, or the run has ended."""
        if not live:
            self.release()
        elif self._handle is not None and self._is_asked_for():
            self._let_go()
            self.is_elsewhere = True
        elif self._handle is None:
            self._try_to_hold()

    def take_over(self) -> None:
        """Ask the window that controls the run to give it up; `update` then takes it. Raises DiskError."""
        replace_file(self._folder.window_request, self._name())
        self._has_asked = True

    def require(self) -> None:
        """Raises UserError where another window controls the run."""
        if self.is_elsewhere:
            raise UserError("run", "Another window controls this run. Take over there first.")

    def repeat_stop(self) -> None:
        """Write stop again where it came too early: a starting trainer deletes the control words that it finds."""
        is_there = self._folder.control.exists() or self._folder.control_taken.exists()
        if not is_there:
            with contextlib.suppress(UserError):  # a disk that is full now: tried again at the next look
                self._folder.say("stop")

    def release(self) -> None:
        """Give the control up; the run is not touched."""
        self._let_go()
        self._has_asked = self.is_elsewhere = False

    def _try_to_hold(self) -> None:
        if self._is_asked_for():  # it is about to be another's
            self.is_elsewhere = True
            return
        try:
            self._handle = file_lock.try_hold(self._folder.window_lock)
        except OSError:  # a folder that cannot be written: what is sent to the run then says so itself
            self.is_elsewhere = False
            return
        self.is_elsewhere = self._handle is None
        if self._handle is not None and self._has_asked:
            self._has_asked = False
            self._folder.window_request.unlink(missing_ok=True)

    def _is_asked_for(self) -> bool:
        """Whether another window has asked for the control, not too long ago."""
        request = self._folder.window_request
        try:
            age_s = time.time() - request.stat().st_mtime
            return abs(age_s) < ANSWER_S and read_regular(request) != self._name().encode()
        except OSError:
            return False

    def _let_go(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _name(self) -> str:
        return f"{os.getpid()}-{id(self)}"
