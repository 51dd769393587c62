"""Summary of a run for the archive: state, step, reward, duration. Reads both ends of the event log only, however long it is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

import yaml

from backend.config.config import SETTINGS, keys_used_by
from backend.runs.events import ENDINGS, Event, first_and_last_events
from backend.runs.queue import is_waiting
from backend.runs.run_folder import RunFolder, all_runs
from backend.runs.steering import changed_values, read_changes
from backend.utils.documents import YAML_LIMIT, parse_yaml
from backend.utils.errors import UserError
from backend.utils.files import read_text
from backend.utils.text import quote

State = Literal["queued", "starting", "running", "finished", "stopped", "failed", "crashed"]
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML was built with it: four times as fast, which a list of a thousand runs notices."""
STARTUP_GRACE_S = 20.0
"""How long a process may take from its start to taking the lock (it imports first) before it counts as crashed."""


@dataclass(frozen=True, slots=True)
class Summary:
    """`state`: queued, starting, running, finished, stopped, failed or crashed. Numbers are None before there is any.

    `reward` is the newest step's, `reward_before` and `reward_after` are means over the first and the last few steps.
    `began` is in unix seconds; `worked_s` excludes loading, pauses and the time between two processes.
    """

    name: str
    path: str
    state: str
    model: str
    step: int | None
    iterations: int | None
    reward: float | None
    sentence: str
    reward_before: float | None = None
    reward_after: float | None = None
    began: float | None = None
    worked_s: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the newest step, as the event log has them."""
    ranks: int | None = None
    """Processes that it trains on, by its newest start."""
    machines: list[str] = field(default_factory=list[str])
    """The machine of each rank, where there are several."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summary(run: RunFolder) -> Summary:
    """Summarise a run from its lock, its settings and both ends of its event log."""
    locked = run.is_locked()  # before reading: a process that releases the lock has written everything
    first, last = first_and_last_events(run.events)
    events = _merge_ends(first, last)
    steps = [event for event in events if event["kind"] == "step"]
    starts = [event for event in events if event["kind"] == "started"]
    settings, newest = raw_settings(run), steps[-1] if steps else {}
    ending = last[-1] if last and last[-1]["kind"] in ENDINGS else None
    before, after = first_and_last_means((_metrics(step).get("reward") for step in steps), newest.get("step"))
    return Summary(
        name=run.name,
        path=str(run.path),
        # Under the lock an ending is that of an earlier process: the process that holds the lock has resumed the run.
        state=state_of(
            None if locked else ending,
            is_locked=locked,
            has_started=bool(starts),
            may_be_coming=not last and may_be_starting(run),
            is_queued=not last and not locked and is_waiting(run),
        ),
        model=str(settings.get("model", "")),
        step=newest.get("step"),
        iterations=_iterations(run, starts, ending, settings),
        reward=_metrics(newest).get("reward"),
        sentence=str(ending.get("sentence", "")) if ending else "",
        reward_before=before,
        reward_after=after,
        began=starts[0].get("t") if starts else _modified_at(run.config) or None,
        worked_s=_working_seconds(events) if steps else None,
        metrics=_metrics(newest),
        ranks=_int_or_none(starts[-1].get("ranks")) if starts else None,
        machines=_machines(starts[-1]) if starts else [],
    )


def _machines(started: Event) -> list[str]:
    """Names of the ranks' machines; none where a damaged event log tells none."""
    told = started.get("machines")
    entries = cast("list[Any]", told) if isinstance(told, list) else []
    names = [cast("dict[str, Any]", entry).get("machine") for entry in entries if isinstance(entry, dict)]
    return [quote(name, 40) for name in names if name]


def _iterations(run: RunFolder, starts: list[Event], ending: Event | None, settings: Any) -> int | None:
    """How long the run is: as the newest change of it says, else as its newest process began."""
    with suppress(UserError):  # a damaged list of changes is told where the run goes on
        changed = [change.settings["iters"][1] for change in read_changes(run) if "iters" in change.settings]
        if changed:
            return _int_or_none(changed[-1])
    has_begun = (
        bool(starts) and (ending or {}).get("reason") != "cloned"
    )  # a clone's event log begins with its parent's
    return starts[-1].get("iterations") if has_begun else _int_or_none(settings.get("iters"))


def averaging_window(count: int) -> int:
    """Steps averaged at each end of a run of `count` steps: ten, or a quarter of a short run. A single step is noise."""
    return max(1, min(10, count // 4))


def first_and_last_means(values: Iterable[Any], count: int | None = None) -> tuple[float | None, float | None]:
    """Means over the first and the last `averaging_window` values that are numbers; (None, the only value) below two.

    `count`: the steps of the run, if `values` covers only its two ends.
    """
    numbers = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if len(numbers) < 2:
        return None, numbers[0] if numbers else None
    size = min(averaging_window(count or len(numbers)), len(numbers) // 2)
    return sum(numbers[:size]) / size, sum(numbers[-size:]) / size


def may_be_starting(run: RunFolder) -> bool:
    """Whether the folder was written so recently that a trainer may still be importing, before it takes the lock."""
    # A clock that was set back leaves files of the future, which would be starting until it has caught up.
    age_s = time.time() - max(_modified_at(run.config), _modified_at(run.log))
    return abs(age_s) < STARTUP_GRACE_S


def state_of(
    ending: Event | None, *, is_locked: bool, has_started: bool, may_be_coming: bool, is_queued: bool = False
) -> State:
    """The state of a run from its event log and its lock; no pid is trusted. The window's live state refines this one.

    `ending`: the event that ended the run, if one did. `has_started`: the event log has a `started` event of the present process.
    `may_be_coming`: nothing holds the lock, but a process that was just launched may still be importing.
    `is_queued`: it has never begun, and waits its turn (`backend.runs.queue`).
    """
    if ending is not None:
        return ending["kind"]
    if is_locked:
        return "running" if has_started else "starting"
    if is_queued:
        return "queued"
    return "starting" if may_be_coming else "crashed"


def training_run(folder: Path | None = None) -> RunFolder | None:
    """A run in `folder` (the runs folder by default) that trains, or was just launched and may still be importing; None where none does."""
    return next((run for run in all_runs(folder) if run.is_locked() or _was_just_launched(run)), None)


def _was_just_launched(run: RunFolder) -> bool:
    return not run.has_event_log and may_be_starting(run) and not is_waiting(run)


def _merge_ends(first: list[Event], last: list[Event]) -> list[Event]:
    """Both ends as one list; those of a short event log overlap."""
    overlap = next((index for index, event in enumerate(last) if event == first[-1]), -1) if first else -1
    return first + last[overlap + 1 :]


def _working_seconds(events: list[Event]) -> float:
    clock = WorkClock()
    for event in events:
        clock.take(event)
    return clock.seconds


def _metrics(step: Event) -> dict[str, Any]:
    metrics = step.get("metrics")
    return cast("dict[str, Any]", metrics) if isinstance(metrics, dict) else {}


def _modified_at(path: Path) -> float:
    """When a file was last written, in unix seconds; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _int_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def raw_settings(run: RunFolder) -> dict[str, Any]:
    """A run's settings at its end, not validated: config.yaml and what was changed since. Empty where config.yaml cannot be read."""
    try:
        text = read_text(run.config, "config", YAML_LIMIT)
        # libyaml has no limits: it reads what is plainly flat, as we write it.
        is_flat = "&" not in text and "!" not in text and sum(map(text.count, ("[", "{", "- -", "? ?"))) < 50
        raw = yaml.load(text, Loader=_SafeLoader) if is_flat else parse_yaml(text, run.name, "config")
    except (UserError, ValueError, OverflowError, yaml.YAMLError):
        return {}
    settings = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    with suppress(UserError):  # a damaged list of changes is told where the run goes on
        settings |= changed_values(read_changes(run))
    return settings


IDLE_PHASES = ("loading", "paused")
"""Phases in which no step is worked on."""


class WorkClock:
    """Sums working time over events: `take` them in order, all of an event log or those of its two ends.

    Attributes: seconds – of work up to the last event; last_t – that event's unix time, None before the first.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.last_t: float | None = None
        self._last_mono: float | None = None
        self._ticking = False

    def take(self, event: Event) -> None:
        t, mono = _number(event.get("t")), _number(event.get("mono"))
        if t is not None:
            if not _may_begin_late(event):
                self.seconds += self._worked_until(t, mono)
            self.last_t, self._last_mono = t, mono
        self._ticking = self._ticks_after(event)

    def stop(self) -> None:
        """Stop counting until an event shows that the run works again."""
        self._ticking = False

    def since_last(self, now: float | None) -> float:
        """Seconds of work since the last event; 0 while paused or loading, or where `now` is None."""
        if now is None or self.last_t is None or not self._ticking:
            return 0.0
        return max(0.0, now - self.last_t)

    def _worked_until(self, t: float, mono: float | None) -> float:
        """Seconds of work between the last event and one at `t`, by the process's monotonic clock where both events have it: unix time
        jumps when the machine has slept or its clock is set."""
        if not self._ticking or mono is None or self._last_mono is None or mono < self._last_mono:
            return self.since_last(t)
        return mono - self._last_mono

    def _ticks_after(self, event: Event) -> bool:
        kind = event.get("kind")
        if kind == "phase":
            return event.get("phase") not in IDLE_PHASES
        if kind == "command":
            return {"pause": False, "resume": True}.get(str(event.get("word")), self._ticking)
        return kind == "step" or (kind not in ("started", *ENDINGS) and self._ticking)


def _may_begin_late(event: Event) -> bool:
    """Whether the time before an event may belong to no process: a process begins with `started` and the phase of loading, and a clone's
    own lines, a change and its ending, may be days younger than the line of its parent that they follow."""
    return (
        event.get("kind") in ("started", "change") or event.get("phase") == "loading" or event.get("reason") == "cloned"
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


COST_SETTINGS = keys_used_by("duration")
"""Settings that change the time of a completion, the model aside. A run that shares more of them predicts better."""
MOST_RUNS = 40
"""The newest runs that are read: an archive may be long, and older runs were made by older versions."""
LEAST_STEPS = 3
"""Shorter runs are left out: the first step includes compilation."""


@dataclass(frozen=True, slots=True)
class CompletionTime:
    """Measured on one earlier run: seconds per completion, training on it included."""

    settings: Mapping[str, Any]
    seconds: float


def seconds_per_completion(values: Mapping[str, Any], known: Iterable[CompletionTime]) -> float | None:
    """The median over the runs of the same model that share most of COST_SETTINGS with `values`; None without such a run."""
    same = [time for time in known if time.settings.get("model") == values["model"]]
    if not same:
        return None
    wanted = _cost_settings(values)
    shared = [
        sum(one == other for one, other in zip(_cost_settings(time.settings), wanted, strict=True)) for time in same
    ]
    most = max(shared)
    return median(time.seconds for time, count in zip(same, shared, strict=True) if count == most)


def _cost_settings(values: Mapping[str, Any]) -> list[Any]:
    """Those of COST_SETTINGS; a run of an older version, which lacks one, had what is its default now."""
    return [values.get(key, SETTINGS[key].default) for key in COST_SETTINGS]


def completion_time_of(run: RunFolder) -> CompletionTime | None:
    """The median over a run's steps; None for fewer than LEAST_STEPS. Reads both ends of the event log, and the settings."""
    first, last = first_and_last_events(run.events)
    by_step = {event.get("step"): event for event in [*first, *last] if event.get("kind") == "step"}
    times = [_positive(event.get("metrics"), "time/step") for event in by_step.values()]
    seconds = [time for time in times if time is not None]
    settings = raw_settings(run)
    if len(seconds) < LEAST_STEPS or not settings:
        return None
    completions = 1
    for key in ("group_size", "batch_size", "gradient_accumulation_steps", "steps_per_generation"):
        value = settings.get(key, 1)
        completions *= value if isinstance(value, int) and value > 0 else 1
    return CompletionTime(settings, median(seconds) / completions)


def _positive(metrics: Any, name: str) -> float | None:
    value = cast("dict[str, Any]", metrics).get(name) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, (int, float)) and value > 0 else None
