"""Summary of a run for the list of runs, its working time, and forecasts; reads only both ends of the event log."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import yaml

from backend.config.config import SETTINGS, keys_used_by
from backend.config.setting import step_parts
from backend.runs.events import ENDINGS, Event, event_ends, is_number
from backend.runs.metric_names import measure_of
from backend.runs.queue import is_waiting
from backend.runs.run_folder import RunFolder, may_be_starting, modified_at
from backend.runs.steering import changed_values, read_changes
from backend.utils.documents import FAST_LOADER, YAML_LIMIT, parse_yaml
from backend.utils.errors import UserError
from backend.utils.files import read_text
from backend.utils.text import quote

State = Literal["queued", "starting", "running", "finished", "stopped", "failed", "crashed"]
IDLE_PHASES = ("loading", "paused", "waiting")


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in the list. `reward` and `metrics` are the newest step's, `reward_before` and `reward_after` means of
    `measure` over the first and the last few steps. `worked_s` excludes loading and pauses."""

    name: str
    path: str
    state: str
    model: str
    step: int | None
    iterations: int | None
    reward: float | None
    sentence: str
    measure: str = "reward"
    reward_before: float | None = None
    reward_after: float | None = None
    began: float | None = None
    worked_s: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    ranks: int | None = None
    machines: list[str] = field(default_factory=list[str])


def summary(run: RunFolder) -> Summary:
    locked = run.is_locked()  # before reading: a process that releases the lock has written everything
    events = event_ends(run.events)
    steps = [event for event in events if event["kind"] == "step"]
    starts = [event for event in events if event["kind"] == "started"]
    settings, newest = raw_settings(run), steps[-1] if steps else {}
    ending = events[-1] if events and events[-1]["kind"] in ENDINGS else None
    metrics = newest.get("metrics") or {}
    measure = measure_of(metrics)
    values = ((step.get("metrics") or {}).get(measure) for step in steps)
    before, after = first_and_last_means(values, newest.get("step"))
    clock, born = WorkClock(), modified_at(run.parent)
    own = [event for event in events if event.get("t", born) >= born]  # a clone's log begins with its parent's
    if own and born and own[0]["kind"] == "step":  # its start is in the middle of a long log, which is not read
        clock.take({"kind": "step", "t": born})
    for event in own:
        clock.take(event)
    started = starts[-1] if starts else {}
    iterations, waits = settings.get("iters"), bool(starts) and locked and events[-1].get("phase") == "waiting"
    # Not the parent's start, where a clone's own is in the middle; and a change of the length is newer than the start.
    if started and started.get("t", born) >= born and "iters" not in _changed(run):
        iterations = started.get("iterations")
    machines = m if isinstance(m := started.get("machines"), list) else []
    names = [machine.get("machine") for machine in machines if isinstance(machine, dict)]
    return Summary(
        name=run.name,
        path=str(run.path),
        # Under the lock an ending is that of an earlier process: the process that holds the lock has resumed the run.
        state="queued"  # for its turn in a sweep
        if waits
        else state_of(
            None if locked else ending,
            is_locked=locked,
            has_started=bool(starts),
            may_be_coming=not events and may_be_starting(run),
            is_queued=not events and not locked and is_waiting(run),
        ),
        model=str(settings.get("model", "")),
        step=newest.get("step"),
        iterations=iterations if isinstance(iterations, int) and not isinstance(iterations, bool) else None,
        reward=metrics.get("reward"),
        sentence=str(ending.get("sentence", "")) if ending else "",
        measure=measure,
        reward_before=before,
        reward_after=after,
        began=born or (starts[0].get("t") if starts else modified_at(run.config) or None),
        worked_s=(clock.seconds or None) if steps else None,
        metrics=metrics,
        ranks=started["ranks"] if isinstance(started.get("ranks"), int) else None,
        machines=[quote(name, 40) for name in names if name],
    )


def averaging_window(count: int) -> int:
    """Steps averaged at each end of a run of `count` steps: ten, or a quarter of a short run."""
    return max(1, min(10, count // 4))


def first_and_last_means(values: Iterable[Any], count: int | None = None) -> tuple[float | None, float | None]:
    """Means at both ends; (None, the only value) below two. `count`: the steps of the run."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if len(numbers) < 2:
        return None, numbers[0] if numbers else None
    size = min(averaging_window(count or len(numbers)), len(numbers) // 2)
    return sum(numbers[:size]) / size, sum(numbers[-size:]) / size


def state_of(
    ending: Event | None, *, is_locked: bool, has_started: bool, may_be_coming: bool, is_queued: bool = False
) -> State:
    """The state of a run. `may_be_coming`: a process just launched may still be importing."""
    if ending is not None:
        return ending["kind"]
    if is_locked:
        return "running" if has_started else "starting"
    if is_queued:
        return "queued"
    return "starting" if may_be_coming else "crashed"


def raw_settings(run: RunFolder) -> dict[str, Any]:
    """A run's settings at its end, not validated: config.yaml and later changes. {} for an unreadable config.yaml."""
    try:
        text = read_text(run.config, "config", YAML_LIMIT)
        # libyaml has no limits: it reads what is plainly flat, as we write it, under headings such as “# Model & Data”.
        content = re.sub(r"(?m)^#.*", "", text)
        is_flat = not re.search("[&!]", content) and sum(map(content.count, ("[", "{", "- -", "? ?"))) < 50
        raw = yaml.load(text, Loader=FAST_LOADER) if is_flat else parse_yaml(text, run.name, "config")
    except (UserError, ValueError, OverflowError, yaml.YAMLError):
        return {}
    return (raw if isinstance(raw, dict) else {}) | _changed(run)


def _changed(run: RunFolder) -> dict[str, Any]:
    try:
        return changed_values(read_changes(run))
    except UserError:  # a damaged list of changes is reported where the run is resumed
        return {}


class WorkClock:
    """Working time without loading, pauses and sleep. `take` the events in order, all or those of the log's ends."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.last_t: float | None = None
        self._last_mono: float | None = None
        self._ticking = False

    def take(self, event: Event) -> None:
        kind, t, mono = event.get("kind"), event.get("t"), event.get("mono")
        if is_number(t):
            # The time before some events may belong to no process: a process begins with `started` and loading, and a
            # clone's own lines may be days younger than the line of its parent that they follow.
            begins = kind in ("started", "change") or event.get("phase") == "loading"
            if not begins and event.get("reason") != "cloned":
                # Unix time jumps when the machine has slept or its clock is set; the monotonic clock does not.
                is_steady = is_number(mono) and self._last_mono is not None and mono >= self._last_mono
                is_timed = self._ticking and is_steady
                self.seconds += mono - self._last_mono if is_timed else self.since_last(t)  # pyright: ignore
            self.last_t, self._last_mono = float(t), float(mono) if is_number(mono) else None
        if kind == "phase":
            self._ticking = event.get("phase") not in IDLE_PHASES
        elif kind == "command":
            self._ticking = {"pause": False, "resume": True}.get(str(event.get("word")), self._ticking)
        else:
            self._ticking = kind == "step" or (kind not in ("started", *ENDINGS) and self._ticking)

    def stop(self) -> None:
        self._ticking = False

    def since_last(self, now: float | None) -> float:
        """Seconds of work since the last event; 0 while paused or loading, or where `now` is None."""
        if now is None or self.last_t is None or not self._ticking:
            return 0.0
        return max(0.0, now - self.last_t)


COST_SETTINGS = keys_used_by("duration")
MOST_RUNS = 40  # that forecasts read, the newest
LEAST_STEPS = 3  # the first step includes compilation


@dataclass(frozen=True, slots=True)
class CompletionTime:
    settings: Mapping[str, Any]
    seconds: float


def seconds_per_completion(values: Mapping[str, Any], known: Iterable[CompletionTime]) -> float | None:
    """Median over the runs of that model and mode that share most of COST_SETTINGS with `values`; None without any."""
    # A run of an older version that lacks a setting had what is its default now.
    defaults = {key: SETTINGS[key].default for key in COST_SETTINGS}
    kind = values["model"], values.get("train_mode", "grpo")
    by_shared: dict[int, list[float]] = {}  # settings that a run shares → the times of such runs
    for time in known:
        theirs = time.settings
        if (theirs.get("model"), theirs.get("train_mode", "grpo")) == kind:
            shared = sum(theirs.get(key, default) == values.get(key, default) for key, default in defaults.items())
            by_shared.setdefault(shared, []).append(time.seconds)
    return median(by_shared[max(by_shared)]) if by_shared else None


def completion_time_of(run: RunFolder) -> CompletionTime | None:
    """The median over a run's first and last steps; None for fewer than LEAST_STEPS."""
    steps = [event for event in event_ends(run.events) if event["kind"] == "step"]
    times = [(event.get("metrics") or {}).get("time/step") for event in steps]
    seconds = [float(value) for value in times if is_number(value) and value > 0]
    settings = raw_settings(run)
    if len(seconds) < LEAST_STEPS or not settings:
        return None
    keys = ["batch_size", "gradient_accumulation_steps", "steps_per_generation"]
    keys += ["group_size"] if "sampling" in step_parts(settings) else []
    completions = math.prod(n for key in keys if isinstance(n := settings.get(key), int) and n > 0)
    return CompletionTime(settings, median(seconds) / completions)
