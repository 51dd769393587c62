"""One line about a run of the archive, read from the two ends of its diary: a long run costs no more than a short one.

No Qt widgets and no loop: a page that wants many of them asks for one at a time, and so stays quick.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.record import LIVE, Record, State, state_of
from app.run import is_young
from backend.spec.archive import edges
from backend.spec.config import read
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder


@dataclass(frozen=True, slots=True)
class Summary:
    """What the list of runs shows. Figures that nobody knows are None."""

    folder: RunFolder
    state: State
    model: str
    step: int
    iterations: int | None
    reward: float | None
    """Mean over the last steps."""
    change: float | None
    """That, less the mean over the first steps."""
    began: float | None
    """Unix seconds."""
    worked_s: float | None

    @property
    def is_live(self) -> bool:
        return self.state in LIVE


def summarise(folder: RunFolder) -> Summary:
    """Look at one run; a few milliseconds. Never raises for what stands in the folder."""
    locked = folder.is_locked()  # before reading: who lets go of the lock has written everything
    record = Record()
    head, tail = edges(folder.events)
    seen = {event.get("seq") for event in head}  # the ends of a short diary overlap
    for event in head + [event for event in tail if event.get("seq") not in seen]:
        record.take(event)
    model, iterations = _told(record) if record.first_started else _configured(folder)
    before, after = before_after(record.steps.get("reward")[1], record.step)
    return Summary(
        folder=folder,
        state=state_of(record, locked=locked, young=record.is_empty and is_young(folder)),
        model=model,
        step=record.step,
        iterations=iterations,
        reward=after,
        change=None if before is None or after is None else after - before,
        began=_began(folder, record),
        worked_s=record.elapsed_s() if record.step else None,
    )


def window_of(count: int) -> int:
    """Steps averaged at each end of a run of `count` steps: ten, or a quarter of a short run; one step is chance."""
    return max(1, min(10, count // 4))


def before_after(values: np.ndarray, count: int | None = None) -> tuple[float | None, float | None]:
    """Means over the first and the last `window_of` values that are numbers; (None, None) below two of them.

    `count` is how many steps the run has, where `values` holds only those at its two ends.
    """
    found = values[np.isfinite(values)]
    if len(found) < 2:
        return None, float(found[0]) if len(found) else None
    size = min(window_of(count or len(found)), len(found) // 2)
    return float(found[:size].mean()), float(found[-size:].mean())


def _told(record: Record) -> tuple[str, int | None]:
    model = (record.first_started or {}).get("model")
    return (model if isinstance(model, str) else ""), record.iterations


def _configured(folder: RunFolder) -> tuple[str, int | None]:
    try:
        config = read(folder.config)
    except Mistake:
        return "", None
    model, iterations = config.get("model"), config.get("iters")
    return str(model or ""), iterations if isinstance(iterations, int) else None


def _began(folder: RunFolder, record: Record) -> float | None:
    told = (record.first_started or {}).get("t")
    if isinstance(told, int | float):
        return float(told)
    try:
        return folder.config.stat().st_mtime
    except OSError:
        return None
