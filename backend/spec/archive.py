"""A run at a glance: state, step and reward, read from both ends of its diary, however long it is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import yaml

from backend.spec.events import ENDINGS, Event, parse_line
from backend.spec.places import RunFolder
from backend.spec.work_clock import WorkClock

State = Literal["starting", "running", "finished", "stopped", "failed", "crashed"]
TAIL_BYTES = 1 << 16
YOUNG_S = 20.0
"""How long a process may take from its start to the lock (it imports first) before its silence means a crash."""


@dataclass(frozen=True, slots=True)
class Summary:
    """`state`: starting, running, finished, stopped, failed or crashed; numbers are None where there is nothing yet.

    `reward` is the newest step's, `reward_before` and `reward_after` are means over the first and the last few steps;
    `began` is in unix seconds, `worked_s` leaves out loading, pauses and the time between two processes.
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summary(run: RunFolder) -> Summary:
    """What the archive shows of a run; the diary is read at both ends only."""
    locked = run.is_locked()  # before reading: who lets go of the lock has written everything
    first, last = edges(run.events)
    events = _joined(first, last)
    steps = [event for event in events if event["kind"] == "step"]
    starts = [event for event in events if event["kind"] == "started"]
    settings, newest = settings_of(run), steps[-1] if steps else {}
    ending = last[-1] if last and last[-1]["kind"] in ENDINGS else None
    before, after = before_after((_metrics(step).get("reward") for step in steps), newest.get("step"))
    return Summary(
        name=run.name,
        path=str(run.path),
        # Under the lock an ending is that of an earlier process: the one that holds it goes on from there.
        state=state_of(
            None if locked else ending,
            is_locked=locked,
            has_started=bool(starts),
            may_be_coming=not last and is_young(run),
        ),
        model=str(settings.get("model", "")),
        step=newest.get("step"),
        iterations=starts[-1].get("iterations") if starts else _count(settings.get("iters")),
        reward=_metrics(newest).get("reward"),
        sentence=str(ending.get("sentence", "")) if ending else "",
        reward_before=before,
        reward_after=after,
        began=starts[0].get("t") if starts else _written(run.config) or None,
        worked_s=_worked(events) if steps else None,
    )


def window_of(count: int) -> int:
    """Steps averaged at each end of a run of `count` steps: ten, or a quarter of a short run; one step is chance."""
    return max(1, min(10, count // 4))


def before_after(values: Iterable[Any], count: int | None = None) -> tuple[float | None, float | None]:
    """Means over the first and the last `window_of` values that are numbers; (None, the one) below two of them.

    `count` is how many steps the run has, where `values` holds only those at its two ends.
    """
    found = [float(one) for one in values if isinstance(one, int | float) and math.isfinite(one)]
    if len(found) < 2:
        return None, found[0] if found else None
    size = min(window_of(count or len(found)), len(found) // 2)
    return sum(found[:size]) / size, sum(found[-size:]) / size


def is_young(run: RunFolder) -> bool:
    """Whether something was written into the folder so lately that a trainer may still be on its way to the lock."""
    return time.time() - max(_written(run.config), _written(run.log)) < YOUNG_S


def state_of(ending: Event | None, *, is_locked: bool, has_started: bool, may_be_coming: bool) -> State:
    """The state of a run from its diary and its lock; no pid is trusted. The window's live state refines this one.

    `ending`: the event that ended the run, if one did. `has_started`: the diary has a `started` event of the present process.
    `may_be_coming`: nothing holds the lock, but a process that was just launched may still be importing.
    """
    if ending is not None:
        return ending["kind"]
    if is_locked:
        return "running" if has_started else "starting"
    return "starting" if may_be_coming else "crashed"


def edges(path: Path) -> tuple[list[Event], list[Event]]:
    """Events of the first TAIL_BYTES of a diary, and of its last ones as far back as they hold a step.

    A step may lie far from the end: a long rollout or evaluation writes thousands of phases after it.
    """
    try:
        with path.open("rb") as file:
            head = file.read(TAIL_BYTES)
            size = file.seek(0, 2)
            reach = TAIL_BYTES
            last = _tail(file, size, reach)
            while reach < size and not any(event["kind"] == "step" for event in last):
                reach *= 4
                last = _tail(file, size, reach)
    except OSError:
        return [], []
    return _events(head), last


def _tail(file: BinaryIO, size: int, reach: int) -> list[Event]:
    """Events of the last `reach` of `size` bytes."""
    file.seek(max(0, size - reach))
    tail = file.read()
    return _events(tail if reach >= size else tail.partition(b"\n")[2])


def _events(data: bytes) -> list[Event]:
    lines = data.rpartition(b"\n")[0].split(b"\n")
    return [event for event in map(parse_line, lines) if event is not None and "kind" in event]


def _joined(first: list[Event], last: list[Event]) -> list[Event]:
    """Both ends as one; those of a short diary overlap."""
    met = next((place for place, event in enumerate(last) if event == first[-1]), -1) if first else -1
    return first + last[met + 1 :]


def _worked(events: list[Event]) -> float:
    clock = WorkClock()
    for event in events:
        clock.take(event)
    return clock.seconds


def _metrics(step: Event) -> dict[str, Any]:
    told = step.get("metrics")
    return cast("dict[str, Any]", told) if isinstance(told, dict) else {}


def _written(path: Path) -> float:
    """When a file was last written, in unix seconds; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def settings_of(run: RunFolder) -> dict[str, Any]:
    """What a run's config.yaml says, unjudged; nothing where it cannot be read."""
    try:
        raw = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
