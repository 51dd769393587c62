"""One run, live or archived: its state, reduced from its event log, and what follows it on the event loop."""

import contextlib
import math
import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from app.state.run_files import STEERED_STATES, file_stamp, problem_of
from backend.config.config import SETTINGS, Config, parse, read
from backend.config.setting import has_default_rewards
from backend.distributed.hosts_file import MOST_HOSTS
from backend.distributed.ranks import RankInfo
from backend.rewards.catalogue import DEFAULT_REWARDS, metric_name, split_names
from backend.runs import archive
from backend.runs.archive import WorkClock
from backend.runs.completion_rows import CompletionIndex
from backend.runs.events import ENDINGS, KINDS, Event, Follower, is_step
from backend.runs.metric_names import MEASURES, measure_of
from backend.runs.queue import is_waiting
from backend.runs.run_folder import STARTUP_GRACE_S, RunFolder, may_be_starting
from backend.runs.start_progress import StartProgress
from backend.runs.steering import Change, changed, config_at, read_changes, request_change
from backend.utils.errors import UserError
from backend.utils.files import last_line

MOST_METRICS = 500  # metrics of a run that are read: 64 machines and 50 reward functions have fewer


class Series:
    """Metrics by step, in growing columns: the first MOST_METRICS."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def append(self, step: int, values: Mapping[str, float | None]) -> None:
        """Append a step, replacing it and all after it."""
        if self._steps and step <= self._steps[-1]:
            size = bisect_left(self._steps, step)
            for column in (self._steps, *self._columns.values()):
                del column[size:]
        for name in values:
            if name not in self._columns and len(self._columns) < MOST_METRICS:
                self._columns[name] = array("d", [math.nan]) * len(self._steps)
        self._steps.append(step)
        for name, column in self._columns.items():
            value = values.get(name)
            column.append(math.nan if value is None else value)

    @property
    def span(self) -> tuple[int, int] | None:
        return (self._steps[0], self._steps[-1]) if self._steps else None

    def names(self) -> list[str]:
        """Metrics in the order of their first appearance."""
        return list(self._columns)

    def get(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps `[n]` int64, values `[n]` float64 with NaN in gaps)."""
        column = self._columns.get(name)
        return (np.empty(0, np.int64), np.empty(0)) if column is None else (np.array(self._steps), np.array(column))

    def latest(self, name: str) -> float | None:
        return next((value for value in reversed(self._columns.get(name, ())) if value == value), None)


MarkKind = Literal["eval", "checkpoint", "change", "health", "resume"]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step, which may explain the bend of a curve."""

    step: int
    kind: MarkKind
    sentence: str


State = archive.State | Literal["reading", "paused", "stopping"]  # reading: its event log, for the first time
LIVE: tuple[State, ...] = ("reading", "starting", "running", "paused", "stopping")

PHASE_WORDS = {
    "loading": "loading the model",
    "sampling": "sampling completions",
    "scoring": "scoring",
    "learning": "learning",
    "evaluating": "answering held-out prompts",
    "saving": "saving",
    "exporting": "exporting the model",
    "paused": "paused",
    "waiting": "waiting for its turn in the sweep",
}

RATE_WINDOW = 50  # steps that the time left is estimated from
KEPT = 200
NEEDED = {  # kind of event → fields without which it says nothing
    **dict.fromkeys(("step", "eval"), ("step", "metrics")),
    "checkpoint": ("step",),
    "change": ("step", "settings"),
}


class RunState:
    """The state of a run, as far as its event log was read."""

    def __init__(self) -> None:
        self.steps = Series()
        self.evals = Series()
        self.marks: list[Mark] = []
        self.saved_step: int | None = None
        self.test_metrics: dict[str, Any] = {}
        self.started: Event | None = None
        self.ending: Event | None = None
        self.phase = ""
        self._phase_event: Event = {}
        self.paused = False
        self.stopping = False
        self._is_warming_up = False
        self.iterations: int | None = None
        self.step = 0
        self.notes: deque[Event] = deque(maxlen=KEPT)
        self.health: deque[Event] = deque(maxlen=KEPT)
        self._clock = WorkClock()
        self._step_times: deque[tuple[int, float]] = deque(maxlen=RATE_WINDOW + 1)

    def clear_process(self) -> None:
        """Forget the last process: a new one resumes this run."""
        self.started = self.ending = None
        self.phase, self._phase_event = "", {}
        self.paused = self.stopping = False
        self._clock.stop()
        self._step_times.clear()

    @property
    def pause_reason(self) -> str:
        return str(self._phase_event.get("sentence") or "") if self.paused else ""

    @property
    def phase_progress(self) -> float | None:
        """Share of the phase that is done, 0 to 1, or None."""
        progress, done, total = (self._phase_event.get(key) for key in ("progress", "done", "total"))
        share = done / total if done is not None and total else progress
        return None if share is None else min(1.0, max(0.0, share))

    @property
    def last_t(self) -> float | None:
        return self._clock.last_t

    def state(
        self, *, is_locked: bool, may_be_coming: bool, is_queued: bool = False, stop_requested: bool = False
    ) -> State:
        """The live state. `stop_requested`: by this window, not yet logged; others as `archive.state_of`."""
        state = archive.state_of(
            self.ending,
            is_locked=is_locked,
            has_started=self.started is not None,
            may_be_coming=may_be_coming,
            is_queued=is_queued,
        )
        if state in ("starting", "running") and (stop_requested or self.stopping):
            return "stopping"
        return "paused" if state == "running" and self.paused else state

    def elapsed_s(self, now: float | None = None) -> float:
        """Seconds of steps, evaluation and saving; `now` (unix seconds) adds the time since a live run's last event."""
        return self._clock.seconds + self._clock.since_last(now)

    def eta_s(self, now: float | None = None) -> float | None:
        """Estimated seconds left, from the rate of the last steps; None before a step, and once it is exceeded."""
        if self.ending or not self.iterations or not self._step_times:
            return None
        (first, then), (last, at) = self._step_times[0], self._step_times[-1]
        seconds_per_step = (at - then) / (last - first) if last > first else at / last if last == 1 else None
        if seconds_per_step is None:
            return None
        left = seconds_per_step * (self.iterations - last) - (self.elapsed_s(now) - at)
        return left if left > 0 else None

    def apply(self, event: Event) -> None:
        """Take an event as `backend.runs.events` reads it: each field is missing, None or of its type."""
        kind = event.get("kind")
        if kind not in KINDS or any(event.get(field) is None for field in NEEDED.get(kind, ())):  # or it is damaged
            return
        self._clock.take(event)
        if kind in ENDINGS:
            self.ending = event
            self.phase, self._phase_event = "", {}
            self.paused = self.stopping = False
            return
        step, metrics = event.get("step", self.step), event.get("metrics", {})
        match kind:
            case "started":
                self.clear_process()
                if self.step:
                    self.marks.append(Mark(self.step, "resume", f"Resumed after step {self.step:,}."))
                self.started = event
                self.iterations = event.get("iterations") or self.iterations
            case "phase":
                self.phase, self._phase_event = event.get("phase") or "", event
                self.paused = self.phase == "paused"
            case "command":
                word = event.get("word")
                self.stopping = self.stopping or word == "stop"
                if word in ("pause", "resume"):
                    self.paused = word == "pause"
                    self.phase = "" if word == "resume" else self.phase
            case "step":
                self._take_step(step, metrics)
            case "eval":
                if event.get("split") == "test":  # measured once, at the end: a result, not a curve
                    self.test_metrics = metrics
                else:
                    self.evals.append(step, metrics)
                    measure = measure_of(metrics)
                    value, word = metrics.get(measure), MEASURES[measure]
                    result = "Evaluated." if value is None else f"Evaluated: held-out {word} {value:.3g}."
                    self.marks.append(Mark(step, "eval", result))
            case "checkpoint":
                self.saved_step = step
                self.marks.append(Mark(step, "checkpoint", "Saved: a checkpoint."))
            case "change":
                self._take_change(step, event["settings"])
            case "health":
                self.health.append(event)
                if event.get("sentence"):
                    self.marks.append(Mark(step if step is not None else self.step, "health", event["sentence"]))
            case "note":
                self.notes.append(event)

    def _take_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if len(self.steps.names()) < MOST_METRICS < len(metrics):
            sentence = f"Step {step} has {len(metrics):,} metrics; the first {MOST_METRICS:,} of the run are shown."
            self.notes.append({"kind": "note", "step": step, "level": "info", "sentence": sentence})
        was_warming_up, self._is_warming_up = self._is_warming_up, "warmup/loss" in metrics
        if was_warming_up and not self._is_warming_up:
            self.marks.append(Mark(step, "change", "The supervised warm-up is over."))
        self.steps.append(step, metrics)
        self.step = step
        self._step_times.append((step, self._clock.seconds))
        if any(note.get("during") == "pause" for note in self.notes):  # the pause is over
            self.notes = deque((note for note in self.notes if note.get("during") != "pause"), maxlen=KEPT)

    def _take_change(self, step: int, settings: Mapping[str, Any]) -> None:
        known = {key: pair for key, pair in settings.items() if key in SETTINGS and isinstance(pair, list)}
        pairs = {key: (pair[0], pair[1]) for key, pair in known.items() if len(pair) == 2}
        self.marks.append(Mark(step, "change", Change(step, pairs).sentence if pairs else "Settings were changed."))
        if "iters" in pairs and is_step(pairs["iters"][1]):
            self.iterations = pairs["iters"][1]


@dataclass(frozen=True, slots=True)
class RankNow:
    """A rank at the newest step; None for what was not measured."""

    info: RankInfo
    sampling: float | None
    learning: float | None
    prompts: float | None
    memory_gb: float | None
    waiting_share: float | None
    is_lost: bool = False


def ranks_of(run: RunState) -> list[RankNow]:
    """The ranks of a run on several machines, else []."""
    started, ending, latest = run.started or {}, run.ending or {}, run.steps.latest
    ranks = started.get("ranks")
    if not is_step(ranks) or not 1 < ranks <= MOST_HOSTS:
        return []
    infos = {rank: RankInfo(rank, "") for rank in range(ranks)}
    with contextlib.suppress(TypeError, ValueError, KeyError):  # a damaged event log
        infos |= {(info := RankInfo.from_dict(entry)).rank: info for entry in started.get("machines") or ()}
    found, step_s = [], latest("time/step")
    for rank in range(ranks):
        names = ("tokens_per_second", "learn_tokens_per_second", "prompts", "memory", "waiting")
        sampling, learning, prompts, memory, waited = (latest(f"ranks/{rank}/{name}") for name in names)
        share = waited / step_s if waited is not None and step_s else None
        is_lost = ending.get("lost_rank") == rank
        found.append(RankNow(infos[rank], sampling, learning, prompts, memory, share, is_lost))
    return found


LIVE_MS, IDLE_MS, BEHIND_MS = 250, 1000, 4  # polling: of a live run, of one that has ended, while there is more to read
NEWS_MS, NEWS_BEHIND_MS = 500, 2000  # least time between two `changed`, at the end of the event log and before it
SLICE = 256 << 10  # bytes of event log parsed in one go: about 2 ms
BUDGET_S, INDEX_BUDGET_S = 0.02, 0.008  # seconds of a poll, and of that for the index of the completions
SILENT_MIN = 5


def reward_entries(config: Mapping[str, Any]) -> list[str]:
    names = config.get("reward_functions") or (DEFAULT_REWARDS if has_default_rewards(config) else ())
    return split_names(names) if isinstance(names, str | list | tuple) else []


class Run(QObject):
    changed = Signal()  # new events were read; twice a second at most
    state_changed = Signal(str)
    restarted = Signal()  # a resume cut the event log back: discard everything shown so far
    saved = Signal(int)  # the checkpoint of this step is complete that `send("save")` asked for

    def __init__(self, folder: RunFolder, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.folder = folder
        self.clock = RunClock()
        self.data = RunState()  # another object after `restarted`
        self.index = CompletionIndex(folder.completions)
        self.state: State = "starting" if folder.is_locked() else "reading"
        self.has_caught_up = False  # the last poll reached the end of the event log
        self.start_progress: StartProgress | None = None  # of a live run before its first event
        self.silence = ""  # “No sign of life for 5 min.”
        self._follower = Follower(folder.events, limit=SLICE)
        self._log_stamp: tuple[int, int] | None = None
        self._log_written = 0.0
        self._has_news = False
        self._last_changed = 0.0
        self._stop_requested = self._save_requested = False
        self._expected_until: float | None = None
        self._config: tuple[tuple[int, int] | None, dict[str, Any]] = (None, {})
        # Everything runs on the GUI thread, in slices of BUDGET_S: no lock is needed, and no page reads half an update.
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.poll)
        self._timer.start(0)  # the first poll comes from the event loop, when the caller has connected to the signals

    def close(self) -> None:
        self._timer.stop()

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @property
    def step(self) -> int:
        """The newest step whose metrics were read; 0 before the first."""
        return self.data.step

    @property
    def iterations(self) -> int | None:
        iterations = self.data.iterations or self.config.get("iters")
        return iterations if isinstance(iterations, int) and not isinstance(iterations, bool) else None

    @property
    def elapsed_s(self) -> float:
        return self.data.elapsed_s(self.clock.now() if self.is_live else None)

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds of work left; None while unknown."""
        return self.data.eta_s(self.clock.now()) if self.is_live and self.has_caught_up else None

    @property
    def read_share(self) -> float | None:
        """Share of the event log read so far, 0 to 1; None at its end."""
        _, size = file_stamp(self.folder.events)
        return None if self.has_caught_up or not size else min(1.0, self._follower.offset / size)

    @property
    def problem(self) -> str:
        return problem_of(self.state, self.data.ending, self.step, self.folder)

    @property
    def config(self) -> dict[str, Any]:
        written = file_stamp(self.folder.config)
        if written != self._config[0]:  # pages ask several times a second; parsing YAML takes milliseconds
            self._config = (written, {})
            with contextlib.suppress(UserError):
                self._config = (written, read(self.folder.config))
        return self._config[1]

    @property
    def reward_names(self) -> list[str]:
        """Reward functions in the order of the config, then others in the event log."""
        listed = [metric_name(entry) for entry in reward_entries(self.config)]
        parts = (name.split("/") for name in self.data.steps.names())
        return list(dict.fromkeys([*listed, *(part[1] for part in parts if part[0] == "rewards" and len(part) == 3)]))

    @property
    def measure(self) -> str:
        return measure_of(self.data.steps.names())

    def series(self, name: str, *, held_out: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(steps `[n]`, values `[n]` with NaN in gaps), read-only; of the evaluations if `held_out`."""
        return (self.data.evals if held_out else self.data.steps).get(name)

    def send(self, word: str) -> None:
        """Send the trainer a command: pause, resume, save, stop. Raises UserError."""
        self.folder.say(word)
        self._stop_requested = self._stop_requested or word == "stop"
        self._save_requested = self._save_requested or word == "save"
        self.poll()

    def settings_now(self) -> tuple[Config, list[Change]]:
        """(settings with every change, the changes by step, perhaps one to come). Raises UserError."""
        changes = read_changes(self.folder)
        return config_at(parse(self.config), changes), changes

    def change(self, settings: Mapping[str, Any]) -> None:
        """Ask the trainer to change these raw settings from its next step on. Raises UserError."""
        if self.state not in STEERED_STATES:
            raise UserError("run", "Settings change while a run is training or paused.")
        changed(self.settings_now()[0], settings, self.step)
        request_change(self.folder, settings)

    def expect_process(self) -> None:
        self._stop_requested = False
        self._expected_until = time.monotonic() + STARTUP_GRACE_S
        self.poll()

    def poll(self) -> None:
        """Read new data for at most BUDGET_S, and emit signals."""
        locked = self.folder.is_locked()  # before reading: a trainer writes everything before it releases the lock
        deadline = time.perf_counter() + BUDGET_S
        was_at_end, last_t = self.has_caught_up, self.data.last_t
        self.has_caught_up = self._read_event_log(deadline)
        if was_at_end and self.data.last_t not in (None, last_t):
            self.clock.hear(self.data.last_t or 0.0)
        deadline = min(deadline, time.perf_counter() + INDEX_BUDGET_S)
        more_rows = self.index.advance()
        while more_rows and time.perf_counter() < deadline:
            more_rows = self.index.advance()
        if self.has_caught_up:  # before the end of the event log its state is that of some earlier time
            self._update_state(locked)
            is_resumed = self._expected_until is not None  # the last event is an earlier process's
            heard = max(self.data.last_t or 0.0, self._log_written)
            waits = not self.is_live or self.state == "paused" or is_resumed or not heard
            hours, minutes = divmod(int(0 if waits else self.clock.silence_s(heard) // 60), 60)
            duration = f"{hours} h {minutes} min" if hours else f"{minutes} min"
            silence = f"No sign of life for {duration}." if 60 * hours + minutes >= SILENT_MIN else ""
            self._has_news = self._has_news or silence != self.silence
            self.silence = silence
        # 0.9: Qt's coarse timers fire up to 5 % early, and every second poll would then emit nothing.
        now, least_s = time.monotonic(), (NEWS_MS if self.has_caught_up else NEWS_BEHIND_MS) * 0.9e-3
        if self._has_news and now - self._last_changed >= least_s:
            self._has_news, self._last_changed = False, now
            self.changed.emit()
        behind = not self.has_caught_up or more_rows
        self._timer.setInterval(BEHIND_MS if behind else LIVE_MS if self.is_live else IDLE_MS)

    def _read_event_log(self, deadline: float) -> bool:
        while True:
            position = self._follower.offset
            events = self._follower.read()
            if self._follower.restarted:
                self.data = RunState()
                self.index.clear()
                self.restarted.emit()
            for event in events:
                self.data.apply(event)
                if self._save_requested and event.get("kind") == "checkpoint":
                    self._save_requested = False
                    self.saved.emit(self.data.saved_step or 0)
            self._has_news = self._has_news or bool(events)
            if not events and self._follower.offset == position:  # a slice of invalid lines has no events either
                return True
            if time.perf_counter() > deadline:
                return False

    def _update_state(self, locked: bool) -> None:
        if locked:
            self._expected_until = None
        is_empty = self.data.last_t is None
        may_be_coming = is_empty and may_be_starting(self.folder)
        if self._expected_until is not None:
            may_be_coming = time.monotonic() < self._expected_until
            if may_be_coming:
                self.data.clear_process()  # what was read so far, an ending perhaps, is the old process's
        state = self.data.state(
            is_locked=locked,
            may_be_coming=may_be_coming,
            is_queued=is_empty and not locked and is_waiting(self.folder),
            stop_requested=self._stop_requested,
        )
        if state not in LIVE:
            self._stop_requested = False
        elif (
            self._stop_requested
            and locked
            and not (self.data.stopping or self.folder.control.exists() or self.folder.control_taken.exists())
        ):
            # It came too early: a starting trainer deletes the commands that it finds.
            with contextlib.suppress(UserError):  # a full disk: tried again at the next poll
                self.folder.say("stop")
        if state in LIVE and self.state not in LIVE:
            self.clock.expect()
        self.start_progress = self._read_start_progress() if state in LIVE and self.data.started is None else None
        if state != self.state:
            self.state = state
            self._has_news = True
            self.state_changed.emit(state)

    def _read_start_progress(self) -> StartProgress | None:
        stamp = file_stamp(self.folder.log)
        self._log_written = stamp[0] / 1e9
        if self._log_written < (self.data.last_t or 0.0):  # the event log is newer
            return None
        if stamp == self._log_stamp:
            return self.start_progress
        self._log_stamp, self._has_news = stamp, True
        return StartProgress.read(last_line(self.folder.log))


class RunClock:
    """Unix time as the writer of an event log sees it: its newest event, plus monotonic time since."""

    def __init__(self) -> None:
        self.monotonic = time.monotonic
        self._then, self._at = time.time(), self.monotonic()
        self._process_since = float("-inf")

    def expect(self) -> None:
        self._process_since = self.now()

    def hear(self, t: float) -> None:
        self._then, self._at = t, self.monotonic()

    def now(self) -> float:
        return self._then + self.monotonic() - self._at

    def silence_s(self, last_t: float) -> float:
        return max(0.0, self.now() - max(last_t, self._process_since))
