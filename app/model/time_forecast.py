"""Seconds per completion on this machine, measured from archived runs, which are read one per turn of the event loop.

Not in a thread: Python's garbage collector runs in whichever thread triggers it, and a QObject that is destroyed outside the GUI
thread crashes the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from PySide6.QtCore import QObject, QTimer, Signal

from backend.spec.run_folder import RunFolder, all_runs
from backend.spec.throughput import MOST_RUNS, CompletionTime, completion_time_of, seconds_per_completion

REST_MS = 15
"""Pause between two runs, so that typing and painting come first."""


class TimeForecast(QObject):
    """Signals:
    changed – the archive was read, and forecasts may differ.
    """

    changed = Signal()

    def __init__(self, parent: QObject | None = None, runs: Callable[[], Iterable[RunFolder]] = all_runs) -> None:
        super().__init__(parent)
        self._runs = runs
        self._known: list[CompletionTime] = []
        self._read: list[CompletionTime] = []
        self._waiting: Iterator[RunFolder] = iter(())
        self._timer = QTimer(self, interval=REST_MS)
        self._timer.timeout.connect(self._read_one)

    def refresh(self) -> None:
        """Read the archive again, unless it is being read."""
        if not self._timer.isActive():
            self._read, self._waiting = [], islice(self._runs(), MOST_RUNS)
            self._timer.start()

    def seconds_per_completion(self, values: Mapping[str, Any]) -> float | None:
        """Seconds per completion in the runs read so far; None if none of them has the same model."""
        return seconds_per_completion(values, self._known)

    def _read_one(self) -> None:
        run = next(self._waiting, None)
        if run is not None:
            time = completion_time_of(run)
            self._read += [time] if time is not None else []
            return
        self._timer.stop()
        if self._read != self._known:
            self._known = self._read
            self.changed.emit()
