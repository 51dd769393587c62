"""A run at a glance: state, step and reward, read from the last lines of its diary, however long it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

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
    first, last = edges(run.events)
    steps = [event for event in last if event["kind"] == "step"]
    starts = [event for event in (*first, *last) if event["kind"] == "started"]
    metrics = cast("dict[str, Any]", steps[-1].get("metrics", {})) if steps else {}
    return Summary(
        name=run.name,
        path=str(run.path),
        state=state(run, last),
        model=str(_settings(run).get("model", "")),
        step=steps[-1].get("step") if steps else None,
        iterations=starts[-1].get("iterations") if starts else None,
        reward=metrics.get("reward"),
        sentence=str(last[-1].get("sentence", "")) if last and last[-1]["kind"] in ENDINGS else "",
    )


def state(run: RunFolder, last: list[Event]) -> str:
    """The run's state from the end of its diary and its lock; no pid is trusted."""
    ending = last[-1]["kind"] if last and last[-1]["kind"] in ENDINGS else None
    if run.is_locked():
        return "running" if last else "starting"
    return ending or ("crashed" if last else "starting")


def edges(path: Path) -> tuple[list[Event], list[Event]]:
    """Events of the first and of the last TAIL_BYTES of a diary."""
    try:
        with path.open("rb") as file:
            head = file.read(TAIL_BYTES)
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
    except OSError:
        return [], []
    whole = tail if size <= TAIL_BYTES else tail.partition(b"\n")[2]
    return _events(head), _events(whole)


def _events(data: bytes) -> list[Event]:
    lines = data.rpartition(b"\n")[0].split(b"\n")
    return [event for event in map(parse_line, lines) if event is not None and "kind" in event]


def _settings(run: RunFolder) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
