"""A run at a glance: state, step and reward, read from both ends of its diary, however long it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import yaml

from backend.spec.events import ENDINGS, Event, parse_line
from backend.spec.places import RunFolder

TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Summary:
    """`state`: starting, running, finished, stopped, failed or crashed; numbers are None where there is nothing yet."""

    name: str
    path: str
    state: str
    model: str
    step: int | None
    iterations: int | None
    reward: float | None
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summary(run: RunFolder) -> Summary:
    """What the archive shows of a run; the diary is read at both ends only."""
    locked = run.is_locked()  # before reading: who lets go of the lock has written everything
    first, last = edges(run.events)
    steps = [event for event in last if event["kind"] == "step"]
    starts = [event for event in (*first, *last) if event["kind"] == "started"]
    told = steps[-1].get("metrics") if steps else None
    metrics = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    return Summary(
        name=run.name,
        path=str(run.path),
        state=state(last, locked=locked, began=bool(starts)),
        model=str(_settings(run).get("model", "")),
        step=steps[-1].get("step") if steps else None,
        iterations=starts[-1].get("iterations") if starts else None,
        reward=metrics.get("reward"),
        sentence=str(last[-1].get("sentence", "")) if last and last[-1]["kind"] in ENDINGS else "",
    )


def state(last: list[Event], *, locked: bool, began: bool) -> str:
    """A run's state from the end of its diary and its lock; no pid is trusted. `began`: it has told of a start."""
    if locked:
        return "running" if began else "starting"
    if not last:
        return "starting"
    return last[-1]["kind"] if last[-1]["kind"] in ENDINGS else "crashed"


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


def _settings(run: RunFolder) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
