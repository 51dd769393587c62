"""Working time of a run from its event log: loading, pauses, the time between two processes and the machine's sleep do not count."""

from __future__ import annotations

import math

from backend.runs.events import ENDINGS, Event

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
