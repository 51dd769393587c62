"""The state of one run, reduced from its event log: metrics by step, phase, clock, ending. Events in, state out.

No Qt, no files, no timers: `app.state.run` feeds it. What event log and lock say together is `backend.runs.archive`'s, for the table of
runs as for the live view; pausing and stopping are added here.
"""

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
from backend.distributed.rank_info import RankInfo
from backend.runs import archive
from backend.runs.events import ENDINGS, KINDS, Event
from backend.runs.work_clock import WorkClock

# Metrics by step as columns of float64: one per metric, all as long as the column of steps.

_FIRST_CAPACITY = 1024
_BATCH = 256
"""Rows that wait as dicts before they are stored together: numpy converts a table of them in a tenth of the time that it takes to
store their values one by one."""
_PLAIN: set[type] = {int, float, type(None)}
"""Types that numpy converts as `number` does."""

Row = tuple[int, Mapping[str, Any]]


class Series:
    """Growing columns of float64; appending is amortised constant, reading is a view and costs nothing."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._size = 0
        self._last: int | None = None
        self._steps = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._columns: dict[str, np.ndarray] = {}
        self._waiting: list[Row] = []

    def __len__(self) -> int:
        return self._size + len(self._waiting)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a step. A step that exists already is replaced, and all after it are dropped: steps only rise.

        `values` is kept for a while, and must not be changed afterwards.
        """
        if self._last is not None and step <= self._last:
            self._truncate(step)
        self._waiting.append((step, values))
        self._last = step
        if len(self._waiting) >= _BATCH:
            self._store()

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last step, or None while there is none."""
        self._store()
        return (int(self._steps[0]), int(self._steps[self._size - 1])) if self._size else None

    def names(self) -> list[str]:
        """Every metric so far, in the order of its first appearance."""
        self._store()
        return list(self._columns)

    def get(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps `[n]` int64, values `[n]` float64 with NaN in gaps), read-only; both empty for an unknown name."""
        self._store()
        column = self._columns.get(name)
        if column is None:
            return _read_only(self._steps[:0]), np.empty(0)
        return _read_only(self._steps[: self._size]), _read_only(column[: self._size])

    def latest(self, name: str) -> float | None:
        """The last finite value, or None."""
        return self._finite(name, -1)

    def first(self, name: str) -> float | None:
        """The first finite value, or None."""
        return self._finite(name, 0)

    def _finite(self, name: str, index: int) -> float | None:
        values = self.get(name)[1]
        ends = (
            values[:64] if index == 0 else values[-64:]
        )  # nearly always one of the last values; a run may have a hundred thousand
        for part in (ends, values):
            finite = part[np.isfinite(part)]
            if len(finite):
                return float(finite[index])
        return None

    def _store(self) -> None:
        """Move the rows that wait into the columns; those with the same metrics, which nearly all have, together."""
        waiting, self._waiting = self._waiting, []
        for names, rows in groupby(waiting, key=lambda row: tuple(row[1])):
            self._store_table(names, list(rows))

    def _store_table(self, names: Sequence[str], rows: Sequence[Row]) -> None:
        end = self._size + len(rows)
        while end > len(self._steps):
            self._grow()
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

    def _truncate(self, step: int) -> None:
        self._store()
        self._size = int(np.searchsorted(self._steps[: self._size], step))

    def _grow(self) -> None:
        """Double the capacity. What lies beyond the size is never written here: touching it would hold up the event loop."""
        self._steps = _doubled(self._steps, self._size)
        for name, column in self._columns.items():
            self._columns[name] = _doubled(column, self._size)


def _doubled(column: np.ndarray, size: int) -> np.ndarray:
    larger = np.empty(2 * len(column), dtype=column.dtype)
    larger[:size] = column[:size]
    return larger


def _table(rows: Sequence[Iterable[Any]], width: int) -> np.ndarray:
    """Values `[rows, width]` as float64; NaN for anything but a finite number."""
    cells = list(chain.from_iterable(rows))
    if set(map(type, cells)) <= _PLAIN:
        try:
            table = np.array(cells, dtype=float).reshape(len(rows), width)
        except OverflowError:  # an int beyond the range of a float
            pass
        else:
            table[np.isinf(table)] = np.nan
            return table
    return np.array([number(cell) for cell in cells]).reshape(len(rows), width)


def number(value: Any) -> float:
    """`value` as a float; NaN for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


# ── run state ────────────────────────────────────────────────────────────────────────────────────────────────────────

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

_RATE_WINDOW = 50
"""Steps that the time left is estimated from: enough for a steady figure, few enough to follow completions that grow longer."""
_KEPT = 200
"""Notes and health findings kept in memory; the event log has them all."""


class RunState:
    """The state of a run, as far as its event log was read. `apply` the events in order; `clear` when the event log was cut back."""

    def __init__(self) -> None:
        self._handlers = {kind: getattr(self, f"_on_{kind}", None) for kind in KINDS} | dict.fromkeys(
            ENDINGS, self._on_ending
        )
        self.clear()

    def clear(self) -> None:
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
        self.notes: deque[Event] = deque(maxlen=_KEPT)
        self.health: deque[Event] = deque(maxlen=_KEPT)
        self._clock = WorkClock()
        self._step_times: deque[tuple[int, float]] = deque(maxlen=_RATE_WINDOW + 1)

    def clear_process(self) -> None:
        """Clear the state of the last process, its ending above all: a new process is about to resume this run."""
        self.started = self.ending = None
        self.phase, self._phase_event = "", {}
        self.paused = self.stopping = False
        self._clock.stop()
        self._step_times.clear()

    def apply(self, event: Event) -> None:
        """Apply one event. Unknown kinds and fields of the wrong type are skipped."""
        kind = event.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            return
        self._clock.take(event)
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(event)

    @property
    def pause_reason(self) -> str:
        """Why a run paused itself, as one sentence; "" where it was asked to, or does not pause."""
        return str(self._phase_event.get("sentence") or "") if self.paused else ""

    @property
    def phase_progress(self) -> float | None:
        """Share of the phase that is done, 0 to 1, where the event log says."""
        return progress_of(self._phase_event)

    @property
    def is_empty(self) -> bool:
        """Whether no event was applied yet."""
        return self._clock.last_t is None

    @property
    def last_t(self) -> float | None:
        """Unix time of the last event; None before the first."""
        return self._clock.last_t

    def state(
        self, *, is_locked: bool, may_be_coming: bool, is_queued: bool = False, stop_requested: bool = False
    ) -> State:
        """The live state. `may_be_coming` and `is_queued`: as `archive.state_of`; `stop_requested`: by this window, and not yet in the
        event log."""
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
        """Seconds spent on steps, evaluation and saving; loading and pauses are not counted.

        `now` (unix seconds) adds the time since the last event of a run that is alive.
        """
        return self._clock.seconds + self._clock.since_last(now)

    def eta_s(self, now: float | None = None) -> float | None:
        """Estimated seconds left, from the rate of the last steps; None while there is no step."""
        if self.ending or not self.iterations or not self._step_times:
            return None
        (first, then), (last, at) = self._step_times[0], self._step_times[-1]
        seconds_per_step = (at - then) / (last - first) if last > first else at / last if last == 1 else None
        if seconds_per_step is None:
            return None
        return max(0.0, seconds_per_step * max(0, self.iterations - last) - (self.elapsed_s(now) - at))

    def _on_started(self, event: Event) -> None:
        self.clear_process()
        if self.step:
            self._mark(self.step, "resume", f"Resumed after step {self.step:,}.")
        self.started = event
        iterations = event.get("iterations")
        if isinstance(iterations, int) and iterations > 0:
            self.iterations = iterations

    def _on_phase(self, event: Event) -> None:
        phase = event.get("phase", event.get("name"))
        self.phase = phase if isinstance(phase, str) else ""
        self._phase_event = event
        self.paused = self.phase == "paused"

    def _on_command(self, event: Event) -> None:
        word = event.get("word", event.get("command"))
        if word == "stop":
            self.stopping = True
        elif word == "pause":
            self.paused = True
        elif word == "resume":
            self.paused, self.phase = False, ""

    def _on_step(self, event: Event) -> None:
        step, metrics = event.get("step"), event.get("metrics")
        if not _is_count(step) or not isinstance(metrics, dict):
            return
        self.steps.append(step, metrics)
        self.step = step
        self._forget_the_pause()
        self._step_times.append((step, self._clock.seconds))

    def _on_eval(self, event: Event) -> None:
        step, metrics = event.get("step"), event.get("metrics")
        if not _is_count(step) or not isinstance(metrics, dict):
            return
        if event.get("split") == "test":  # measured once, at the end: a result, not a curve
            self.test_metrics = metrics
        else:
            self.evals.append(step, metrics)
            reward = number(metrics.get("reward"))
            self._mark(step, "eval", f"Evaluated: held-out reward {reward:.3g}." if reward == reward else "Evaluated.")

    def _on_checkpoint(self, event: Event) -> None:
        step = event.get("step")
        if _is_count(step):
            self.saved_step = step
            self._mark(step, "checkpoint", "Saved: a checkpoint.")

    def _on_change(self, event: Event) -> None:
        step, settings = event.get("step"), event.get("settings")
        if _is_count(step) and isinstance(settings, dict):
            self._mark(step, "change", change_sentence(settings))
            length = settings.get("iters")
            if isinstance(length, list) and _is_count(length[-1]):
                self.iterations = length[-1]

    def _on_health(self, event: Event) -> None:
        self.health.append(event)
        step, sentence = event.get("step"), event.get("sentence")
        if isinstance(sentence, str):
            self._mark(step if _is_count(step) else self.step, "health", sentence)

    def _mark(self, step: int, kind: MarkKind, sentence: str) -> None:
        self.marks.append(Mark(step, kind, sentence))

    def _on_note(self, event: Event) -> None:
        self.notes.append(event)

    def _forget_the_pause(self) -> None:
        """Drop what was said of a pause: once a step has followed, it is no longer so."""
        if any(note.get("during") == "pause" for note in self.notes):
            kept = [note for note in self.notes if note.get("during") != "pause"]
            self.notes.clear()
            self.notes.extend(kept)

    def _on_ending(self, event: Event) -> None:
        self.ending = event
        self.phase, self._phase_event = "", {}
        self.paused = self.stopping = False


def progress_of(event: Event) -> float | None:
    """Share of a phase that is done, 0 to 1, from `progress`, or `done` of `total`; None where the event has neither."""
    progress, done, total = (number(event.get(key)) for key in ("progress", "done", "total"))
    share = done / total if total > 0 else progress
    return min(1.0, max(0.0, share)) if share == share else None


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


MarkKind = Literal["eval", "checkpoint", "change", "health", "resume"]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step, as one sentence."""

    step: int
    kind: MarkKind
    sentence: str


def change_sentence(settings: Mapping[str, Any]) -> str:
    """The sentence of a `change` event's settings, each old → new: “learning_rate 0.0001 → 5e-05.”"""
    parts = [
        f"{key} {_shown(pair[0])} → {_shown(pair[1])}"
        for key, pair in settings.items()
        if isinstance(pair, list | tuple) and len(pair) == 2
    ]
    return f"Changed: {', '.join(parts)}." if parts else "Settings were changed."


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class RankNow:
    """A rank at the newest step; None where nothing was measured."""

    info: RankInfo
    sampling: float | None
    """Tokens per second."""
    learning: float | None
    """Tokens per second."""
    prompts: float | None
    memory_gb: float | None
    waiting_share: float | None
    """Of the step's time."""
    is_lost: bool = False


def ranks_of(
    started: Mapping[str, Any] | None, ending: Mapping[str, Any] | None, latest: Callable[[str], Any]
) -> list[RankNow]:
    """The ranks of a run's newest process; none for a run on one machine. `latest`: the newest value of a metric, or None."""
    infos = _infos(started or {})
    step_s, lost = _number(latest("time/step")), (ending or {}).get("lost_rank")

    def rank_now(info: RankInfo) -> RankNow:
        def of(name: str) -> float | None:
            return _number(latest(f"ranks/{info.rank}/{name}"))

        waited = of("waiting")
        share = waited / step_s if waited is not None and step_s else None
        return RankNow(
            info, of("tokens_per_second"), of("learn_tokens_per_second"), of("prompts"), of("memory"), share, lost == info.rank
        )  # fmt: skip

    return [rank_now(info) for info in infos]


def _infos(started: Mapping[str, Any]) -> list[RankInfo]:
    """What `started` tells of every rank; a rank that a damaged event log does not describe has its number alone."""
    ranks = started.get("ranks")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 < ranks <= MOST_HOSTS:
        return []
    told: dict[int, RankInfo] = {}
    entries: Any = started.get("machines")
    for entry in cast("list[Any]", entries) if isinstance(entries, list) else []:
        with suppress(TypeError, ValueError, KeyError):
            info = RankInfo.from_dict(entry)
            told[info.rank] = info
    return [told.get(rank) or RankInfo(rank, "") for rank in range(ranks)]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
