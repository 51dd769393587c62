"""The state of one run, reduced from its event log."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from backend.distributed.hosts_file import MOST_HOSTS
from backend.distributed.ranks import RankInfo
from backend.runs import archive
from backend.runs.archive import WorkClock
from backend.runs.events import ENDINGS, KINDS, Event, is_step
from backend.runs.metric_names import MEASURES, measure_of

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


State = archive.State | Literal["paused", "stopping"]
LIVE: tuple[State, ...] = ("starting", "running", "paused", "stopping")

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
NEEDED = {
    **dict.fromkeys(("step", "eval"), ("step", "metrics")),
    "checkpoint": ("step",),
    "change": ("step", "settings"),
}
"""Kind of event → fields without which it says nothing."""


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
        pairs = {key: pair for key, pair in settings.items() if isinstance(pair, list) and len(pair) == 2}
        shown = {key: ["none" if value is None else value for value in pair] for key, pair in pairs.items()}
        text = ", ".join(f"{key} {old} → {new}" for key, (old, new) in shown.items())
        self.marks.append(Mark(step, "change", f"Changed: {text}." if text else "Settings were changed."))
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


def ranks_of(
    started: Mapping[str, Any] | None, ending: Mapping[str, Any] | None, latest: Callable[[str], Any]
) -> list[RankNow]:
    """The ranks of a run on several machines, else []. `latest` returns the newest value of a metric."""
    started, ending = started or {}, ending or {}
    ranks = started.get("ranks")
    if not is_step(ranks) or not 1 < ranks <= MOST_HOSTS:
        return []
    infos = {rank: RankInfo(rank, "") for rank in range(ranks)}
    with suppress(TypeError, ValueError, KeyError):  # a damaged event log
        infos |= {(info := RankInfo.from_dict(entry)).rank: info for entry in started.get("machines") or ()}
    found, step_s = [], latest("time/step")
    for rank in range(ranks):
        names = ("tokens_per_second", "learn_tokens_per_second", "prompts", "memory", "waiting")
        sampling, learning, prompts, memory, waited = (latest(f"ranks/{rank}/{name}") for name in names)
        share = waited / step_s if waited is not None and step_s else None
        is_lost = ending.get("lost_rank") == rank
        found.append(RankNow(infos[rank], sampling, learning, prompts, memory, share, is_lost))
    return found
