"""The present on the clock of a run's event log, and how long the run has been silent; neither sleep nor a clock that is set moves them."""

from __future__ import annotations

import time
from collections.abc import Callable

SILENT_S = 300.0
"""How long a live run may write nothing before the window says so: longer than most single operations of a step take."""


class RunClock:
    """Unix time as the writer of a event log sees it: that of its newest event, plus what has passed since it was read.

    Passed time is monotonic time, which stands still while the machine sleeps. `wall` and `monotonic` are replaced by tests.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._then, self._at = wall(), monotonic()
        self._process_since = float("-inf")

    def expect(self) -> None:
        """A process has just been started for the run: its silence counts from now, and not from the last event of the one before."""
        self._process_since = self.now()

    def hear(self, t: float) -> None:
        """An event with this unix time has just been written. Not for events that were in the event log when it was opened."""
        self._then, self._at = t, self._monotonic()

    def now(self) -> float:
        return self._then + self._monotonic() - self._at

    def silence_s(self, last_t: float | None) -> float:
        """Seconds since the event at `last_t`, the newest of the event log; 0 where there is none."""
        return max(0.0, self.now() - max(last_t, self._process_since)) if last_t is not None else 0.0


def silence_sentence(silence_s: float) -> str:
    """“No sign of life for 5 min.”; empty below SILENT_S."""
    if silence_s < SILENT_S:
        return ""
    minutes = int(silence_s // 60)
    hours, rest = divmod(minutes, 60)
    return f"No sign of life for {f'{hours} h {rest} min' if hours else f'{minutes} min'}."


def silence_advice(pid: object, checkpoint: int | None) -> str:
    """What can be done about a silent run: `pid` of its process as its event log has it, and the step that a resume goes on from."""
    process = f"process {pid}" if isinstance(pid, int) else "its process"
    after = f"goes on from step {checkpoint:,}" if checkpoint is not None else "starts over, as there is no checkpoint"
    return (
        "It may be in one long operation, which Pause and Stop wait for, or hang. The log may tell. "
        f"If it never comes back, end {process}; Resume then {after}."
    )
