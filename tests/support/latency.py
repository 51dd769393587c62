"""A probe of how long the event loop is blocked at a time."""

import gc
import os
import threading
import time
from functools import cache
from pathlib import Path

from PySide6.QtCore import QObject, QTimer

from tests.support.cpu_time import slowness

BLOCK_LIMIT_MS = 100

# Of this thread, on Linux: nanoseconds on a core, nanoseconds of waiting for one, and how often it got one
SCHEDULING = Path("/proc/thread-self/schedstat")


def seconds_without_a_core() -> float:
    """How long this thread has been ready to run while others ran."""
    file = _scheduling_file(threading.get_native_id())
    return int(os.pread(file, 100, 0).split()[1]) / 1e9 if file is not None else 0.0


@cache
def _scheduling_file(thread: int) -> int | None:
    return os.open(SCHEDULING, os.O_RDONLY) if SCHEDULING.exists() else None


class LatencyProbe:
    """Measures the time between two ticks of a 5 ms timer, in milliseconds of CPU time on a usual core."""

    def __init__(self, parent: QObject) -> None:
        gc.collect()
        gc.freeze()
        self.work: list[float] = []
        self.wall: list[float] = []
        self._began = self._now()
        self._timer = QTimer(parent, interval=5)
        self._timer.timeout.connect(self._beat)
        self._timer.start()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.thread_time(), time.perf_counter() - seconds_without_a_core()

    def _beat(self) -> None:
        now = self._now()
        work, wall = ((end - began) * 1e3 for end, began in zip(now, self._began, strict=True))
        scale = slowness() if max(work, wall) > BLOCK_LIMIT_MS / 2 else 1.0
        self.work.append(work / scale)
        self.wall.append(wall / scale)
        self._began = self._now()

    def check(self) -> None:
        """No block over the limit."""
        self._timer.stop()
        worst, usual = max(self.work), sorted(self.wall)[int(len(self.wall) * 0.95)]
        assert worst < BLOCK_LIMIT_MS, f"the loop was held up by {worst:.0f} ms of work"
        assert usual < BLOCK_LIMIT_MS, f"one turn in twenty took {usual:.0f} ms or more"
