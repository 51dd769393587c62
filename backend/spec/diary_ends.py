"""Both ends of a diary, read without what lies between: its first and its last events, and how the run ended."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from backend.spec.event_shape import is_step
from backend.spec.events import Event, parse_line
from backend.spec.regular_file import open_regular
from backend.spec.run_folder import RunFolder

TAIL_BYTES = 1 << 16


def has_finished(run: RunFolder) -> bool:
    """Whether the run has taken all of its steps: its diary ends so."""
    _, last = first_and_last_events(run.events)
    return bool(last) and last[-1]["kind"] == "finished"


def step_of_end(run: RunFolder) -> int | None:
    """The step whose weights a finished run has left, where that is not its last (`load_best_at_end`)."""
    _, last = first_and_last_events(run.events)
    step = last[-1].get("ends_with") if last and last[-1]["kind"] == "finished" else None
    return step if is_step(step) else None


def first_and_last_events(path: Path) -> tuple[list[Event], list[Event]]:
    """(events of the first TAIL_BYTES of a diary, events of its last TAIL_BYTES or of more until they include a `step`).

    A step may be far from the end: a long rollout or evaluation writes thousands of `phase` events after it.
    """
    try:
        with open_regular(path) as file:
            head = file.read(TAIL_BYTES)
            last = last_events(file, file.seek(0, 2))
    except OSError:
        return [], []
    return _events(head), last


def last_events(file: BinaryIO, size: int) -> list[Event]:
    """Events at the end of the first `size` bytes of a diary: of TAIL_BYTES, or of more until they include a `step`."""
    reach = TAIL_BYTES
    last = _tail(file, size, reach)
    while reach < size and not any(event["kind"] == "step" for event in last):
        reach *= 4
        last = _tail(file, size, reach)
    return last


def _tail(file: BinaryIO, size: int, reach: int) -> list[Event]:
    """Events of the last `reach` of the first `size` bytes."""
    start = max(0, size - reach)
    file.seek(start)
    tail = file.read(size - start)
    return _events(tail if reach >= size else tail.partition(b"\n")[2])


def _events(data: bytes) -> list[Event]:
    lines = data.rpartition(b"\n")[0].split(b"\n")
    return [event for event in map(parse_line, lines) if event is not None and "kind" in event]
