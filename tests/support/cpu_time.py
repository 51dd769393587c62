"""CPU time as a usual core would take it, whatever the core at hand is and does beside."""

from __future__ import annotations

import time

COUNT_TO = 50_000
COUNT_MS = 1.7  # how long a core of a usual computer takes to count that far


def slowness() -> float:
    """How many times as long as on a usual core this thread's work takes just now; at least 1."""
    began, total = time.thread_time(), 0
    for number in range(COUNT_TO):
        total += number
    return max(1.0, (time.thread_time() - began) * 1e3 / COUNT_MS)


class Work:
    """`with Work() as work:` measures as `work.seconds` the CPU seconds of this thread on a usual core."""

    seconds = 0.0

    def __enter__(self) -> Work:
        self._slowness, self._began = slowness(), time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        took = time.thread_time() - self._began
        self.seconds = took / max(self._slowness, slowness())
