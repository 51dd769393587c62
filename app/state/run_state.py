"""The state of one run, reduced from its event log."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Literal, TypeGuard, cast

import numpy as np

from backend.distributed.hosts_file import MOST_HOSTS
from backend.distributed.ranks import RankInfo
from backend.runs import archive
from backend.runs.archive import WorkClock
from backend.runs.events import ENDINGS, KINDS, Event

FIRST_CAPACITY = 1024
BATCH = 256
"""Rows that wait to be stored together, which is ten times as fast."""

Row = tuple[int, Mapping[str, Any]]


class Series:
    """Metrics by step, in growing columns of float64. Reading is a view."""

    def __init__(self) -> None:
        self._size = 0
        self._last: int | None = None
        self._steps = np.empty(FIRST_CAPACITY, dtype=np.int64)
        self._columns: dict[str, np.ndarray] = {}
        self._waiting: list[Row] = []

    def __len__(self) -> int:
        return self._size + len(self._waiting)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a step, replacing it and all after it. `values` must not change afterwards."""
        if self._last is not None and step <= self._last:
            self._store()
            self._size = int(np.searchsorted(self._steps[: self._size], step))
        self._waiting.append((step, values))
        self._last = step
        if len(self._waiting) >= BATCH:
            self._store()

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last step, or None."""
        self._store()
        return (int(self._steps[0]), int(self._steps[self._size - 1])) if self._size else None

    def names(self) -> list[str]:
        """Metrics in the order of their first appearance."""
        self._store()
        return list(self._columns)

    def get(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps `[n]` int64, values `[n]` float64 with NaN in gaps), read-only."""
        self._store()
        column = self._columns.get(name)
        n = 0 if column is None else self._size
        views = self._steps[:n].view(), np.empty(0) if column is None else column[:n].view()
        for view in views:
            view.flags.writeable = False
        return views

    def latest(self, name: str) -> float | None:
        """The last finite value, or None."""
        values = self.get(name)[1]
        return next((float(value) for value in values[::-1] if math.isfinite(value)), None)

    def first(self, name: str) -> float | None:
        """The first finite value, or None."""
        return next((float(value) for value in self.get(name)[1] if math.isfinite(value)), None)

    def _store(self) -> None:
        waiting, self._waiting = self._waiting, []
        for names, group in groupby(waiting, key=lambda row: tuple(row[1])):
            rows = list(group)
            end = self._size + len(rows)
            while end > len(self._steps):
                self._steps = _doubled(self._steps, self._size)
                self._columns = {name: _doubled(column, self._size) for name, column in self._columns.items()}
            self._steps[self._size : end] = [step for step, _ in rows]
            table = _table([values.values() for _, values in rows], len(names))
            for name in names:
                if name not in self._columns:
                    self._columns[name] = np.empty(len(self._steps))
                    self._columns[name][: self._size] = np.nan
            values = dict(zip(names, table.T, strict=True))
            for name, column in self._columns.items():
                column[self._size : end] = values.get(name, np.nan)
            self._size = end


def _doubled(column: np.ndarray, size: int) -> np.ndarray:
    larger = np.empty(2 * len(column), dtype=column.dtype)
    larger[:size] = column[:size]
    return larger


def _table(rows: Sequence[Iterable[Any]], width: int) -> np.ndarray:
    cells = list(chain.from_iterable(rows))
    if set(map(type, cells)) <= {int, float, type(None)}:  # numpy converts these as `number` does
        with suppress(OverflowError):  # an int beyond the range of a float
            table = np.array(cells, dtype=float).reshape(len(rows), width)
            table[np.isinf(table)] = np.nan
            return table
    return np.array([number(cell) for cell in cells]).reshape(len(rows), width)


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


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
}

RATE_WINDOW = 50
"""Steps that the time left is estimated from."""
KEPT = 200


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
        """Why a run paused itself, or ""."""
        return str(self._phase_event.get("sentence") or "") if self.paused else ""

    @property
    def phase_progress(self) -> float | None:
        """Share of the phase that is done, 0 to 1, or None."""
        progress, done, total = (number(self._phase_event.get(key)) for key in ("progress", "done", "total"))
        share = done / total if total > 0 else progress
        return min(1.0, max(0.0, share)) if share == share else None

    @property
    def is_empty(self) -> bool:
        return self._clock.last_t is None

    @property
    def last_t(self) -> float | None:
        """Unix time of the last event, or None."""
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
        """Estimated seconds left, from the rate of the last steps; None before a step."""
        if self.ending or not self.iterations or not self._step_times:
            return None
        (first, then), (last, at) = self._step_times[0], self._step_times[-1]
        seconds_per_step = (at - then) / (last - first) if last > first else at / last if last == 1 else None
        if seconds_per_step is None:
            return None
        return max(0.0, seconds_per_step * max(0, self.iterations - last) - (self.elapsed_s(now) - at))

    def apply(self, event: Event) -> None:
        kind = event.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            return
        self._clock.take(event)
        if kind in ENDINGS:
            self.ending = event
            self.phase, self._phase_event = "", {}
            self.paused = self.stopping = False
            return
        step, metrics = event.get("step"), event.get("metrics")
        has_step = _is_count(step)
        match kind:
            case "started":
                self._start(event)
            case "phase":
                phase = event.get("phase", event.get("name"))
                self.phase = phase if isinstance(phase, str) else ""
                self._phase_event = event
                self.paused = self.phase == "paused"
            case "command":
                word = event.get("word", event.get("command"))
                self.stopping = self.stopping or word == "stop"
                if word in ("pause", "resume"):
                    self.paused = word == "pause"
                    self.phase = "" if word == "resume" else self.phase
            case "step" if has_step and isinstance(metrics, dict):
                self._add_step(step, metrics)
            case "eval" if has_step and isinstance(metrics, dict):
                if event.get("split") == "test":  # measured once, at the end: a result, not a curve
                    self.test_metrics = metrics
                else:
                    self.evals.append(step, metrics)
                    reward = number(metrics.get("reward"))
                    result = f"Evaluated: held-out reward {reward:.3g}." if reward == reward else "Evaluated."
                    self.marks.append(Mark(step, "eval", result))
            case "checkpoint" if has_step:
                self.saved_step = step
                self.marks.append(Mark(step, "checkpoint", "Saved: a checkpoint."))
            case "change" if has_step and isinstance(settings := event.get("settings"), dict):
                pairs = {key: pair for key, pair in settings.items() if isinstance(pair, list) and len(pair) == 2}
                shown = {key: ["none" if value is None else value for value in pair] for key, pair in pairs.items()}
                text = ", ".join(f"{key} {old} → {new}" for key, (old, new) in shown.items())
                self.marks.append(Mark(step, "change", f"Changed: {text}." if text else "Settings were changed."))
                length = settings.get("iters")
                if isinstance(length, list) and _is_count(length[-1]):
                    self.iterations = length[-1]
            case "health":
                self.health.append(event)
                if isinstance(sentence := event.get("sentence"), str):
                    self.marks.append(Mark(step if has_step else self.step, "health", sentence))
            case "note":
                self.notes.append(event)

    def _start(self, event: Event) -> None:
        self.clear_process()
        if self.step:
            self.marks.append(Mark(self.step, "resume", f"Resumed after step {self.step:,}."))
        self.started = event
        iterations = event.get("iterations")
        if isinstance(iterations, int) and iterations > 0:
            self.iterations = iterations

    def _add_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.steps.append(step, metrics)
        self.step = step
        self._step_times.append((step, self._clock.seconds))
        if any(note.get("during") == "pause" for note in self.notes):  # the pause is over
            self.notes = deque((note for note in self.notes if note.get("during") != "pause"), maxlen=KEPT)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


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
    started = started or {}
    ranks: Any = started.get("ranks")
    if not _is_count(ranks) or not 1 < ranks <= MOST_HOSTS:
        return []
    infos = {rank: RankInfo(rank, "") for rank in range(ranks)}
    entries: Any = started.get("machines")
    for entry in cast("list[Any]", entries) if isinstance(entries, list) else []:
        with suppress(TypeError, ValueError, KeyError):  # a damaged event log
            info = RankInfo.from_dict(entry)
            infos[info.rank] = info

    def measured(metric: str) -> float | None:
        value = number(latest(metric))
        return value if value == value else None

    found, step_s = [], measured("time/step")
    for rank in range(ranks):
        of_rank = f"ranks/{rank}/"
        waited = measured(f"{of_rank}waiting")
        found.append(
            RankNow(
                infos[rank],
                sampling=measured(f"{of_rank}tokens_per_second"),
                learning=measured(f"{of_rank}learn_tokens_per_second"),
                prompts=measured(f"{of_rank}prompts"),
                memory_gb=measured(f"{of_rank}memory"),
                waiting_share=waited / step_s if waited is not None and step_s else None,
                is_lost=(ending or {}).get("lost_rank") == rank,
            )
        )
    return found
