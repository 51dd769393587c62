"""Working time of a run from its diary: loading, pauses and the time between two processes do not count."""

from __future__ import annotations

import math

from backend.spec.events import ENDINGS, Event

IDLE_PHASES = ("loading", "paused")
"""Phases in which no step is worked on."""


class WorkClock:
    """Sums working time over events: `take` them in order, all of a diary or those of its two ends.

    Attributes: seconds – of work up to the last event; last_t – that event's unix time, None before the first.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.last_t: float | None = None
        self._ticking = False

    def take(self, event: Event) -> None:
        kind, t = event.get("kind"), _number(event.get("t"))
        if t is not None:
            # A process begins with these two, so the time before them may belong to no process.
            if kind != "started" and event.get("phase") != "loading":
                self.seconds += self.since_last(t)
            self.last_t = t
        self._ticking = self._ticks_after(event)

    def stop(self) -> None:
        """Stop counting until an event shows that the run works again."""
        self._ticking = False

    def since_last(self, now: float | None) -> float:
        """Seconds of work since the last event; 0 while paused or loading, or where `now` is None."""
        if now is None or self.last_t is None or not self._ticking:
            return 0.0
        return max(0.0, now - self.last_t)

    def _ticks_after(self, event: Event) -> bool:
        kind = event.get("kind")
        if kind == "phase":
            return event.get("phase") not in IDLE_PHASES
        if kind == "command":
            return {"pause": False, "resume": True}.get(str(event.get("word")), self._ticking)
        return kind == "step" or (kind not in ("started", *ENDINGS) and self._ticking)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
