"""How long a completion takes here, learnt from the archive: a run at a time between two turns of the event loop.

No thread does it. Python clears away what nobody uses in whichever thread happens to run, and a widget or a timer that is
cleared away outside the window's own thread takes the window with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from PySide6.QtCore import QObject, QTimer, Signal

from backend.spec import places
from backend.spec.places import RunFolder
from backend.spec.throughput import LOOKED_AT, Pace, pace_of, seconds_per_completion

REST_MS = 15
"""Between two runs, so that typing and drawing come first."""


class TimeForecast(QObject):
    """Signals: changed – the archive was read, and forecasts may be others now."""

    changed = Signal()

    def __init__(
        self, parent: QObject | None = None, runs: Callable[[], Iterable[RunFolder]] = places.all_runs
    ) -> None:
        super().__init__(parent)
        self._runs = runs
        self._known: list[Pace] = []
        self._read: list[Pace] = []
        self._waiting: Iterator[RunFolder] = iter(())
        self._timer = QTimer(self, interval=REST_MS)
        self._timer.timeout.connect(self._read_one)

    def refresh(self) -> None:
        """Read the archive, soon; a look that is under way is enough."""
        if not self._timer.isActive():
            self._read, self._waiting = [], islice(self._runs(), LOOKED_AT)
            self._timer.start()

    def seconds_per_completion(self, values: Mapping[str, Any]) -> float | None:
        """As far as the archive was read; None where it knows no run of the same model."""
        return seconds_per_completion(values, self._known)

    def _read_one(self) -> None:
        run = next(self._waiting, None)
        if run is not None:
            pace = pace_of(run)
            self._read += [pace] if pace is not None else []
            return
        self._timer.stop()
        if self._read != self._known:
            self._known = self._read
            self.changed.emit()
