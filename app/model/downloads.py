"""Downloads from the Hub that this window has begun: how far each is, and pausing, going on and giving up.

They go on whatever page is looked at. What has arrived of one that ends early is kept, also beyond this session.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from PySide6.QtCore import QObject, Signal

from app.model.service import Service
from backend.spec.faults import Fault

WINDOW_S = 6.0
"""The speed is that of the last few seconds."""

State = Literal["running", "paused", "failed", "done"]


@dataclass(slots=True)
class Download:
    """One model or dataset on its way. `done` and `total` in bytes, None until known; `sentence` says why it failed."""

    id: str
    repo_type: str
    state: State = "running"
    phase: str = "asking"
    done: int = 0
    total: int | None = None
    sentence: str = ""
    number: int = 0
    marks: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def speed(self) -> float | None:
        """Bytes a second; None until that is known."""
        if self.state != "running" or len(self.marks) < 2:
            return None
        (t0, first), (t1, last) = self.marks[0], self.marks[-1]
        return (last - first) / (t1 - t0) if t1 > t0 else None

    @property
    def remaining_s(self) -> float | None:
        speed = self.speed
        return (self.total - self.done) / speed if speed and self.total is not None else None

    def mark(self, now: float) -> None:
        self.marks.append((now, self.done))
        while self.marks[-1][0] - self.marks[0][0] > WINDOW_S:
            self.marks.popleft()


class Downloads(QObject):
    """Signals: changed(Download); finished(Download) – it is on this machine now."""

    changed = Signal(object)
    finished = Signal(object)

    def __init__(self, service: Service, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._service = service
        self._known: dict[tuple[str, str], Download] = {}

    def of(self, repo_type: str) -> list[Download]:
        """Those that are not over."""
        return [one for one in self._known.values() if one.repo_type == repo_type and one.state != "done"]

    def find(self, repo_type: str, id_: str) -> Download | None:
        return self._known.get((repo_type, id_))

    def start(self, repo_type: str, id_: str) -> Download:
        """Begin, or go on with what was paused or failed."""
        one = self._known.setdefault((repo_type, id_), Download(id_, repo_type))
        if one.number:
            return one
        one.state, one.phase, one.sentence = "running", "asking", ""
        one.marks.clear()
        one.number = self._service.ask(
            "download",
            lambda _: self._end(one, "done"),
            refused=lambda faults: self._fail(one, faults),
            told=lambda told: self._hear(one, told),
            owner=self,
            id=id_,
            repo_type=repo_type,
        )
        self.changed.emit(one)
        return one

    def pause(self, one: Download) -> None:
        """Stop for now; what has arrived stays."""
        if one.number:
            self._service.cancel(one.number)
            self._end(one, "paused")

    def give_up(self, one: Download) -> None:
        """Stop, and throw away what has arrived of the files that are not whole."""
        self.pause(one)
        self._known.pop((one.repo_type, one.id), None)
        one.state = "done"
        self._service.ask("discard", lambda _: None, id=one.id, repo_type=one.repo_type)
        self.changed.emit(one)

    def _hear(self, one: Download, told: dict[str, Any]) -> None:
        one.phase, one.done, one.total = told["phase"], told["done"], told["total"] or one.total
        if one.phase == "downloading":
            one.mark(time.monotonic())
        self.changed.emit(one)

    def _fail(self, one: Download, faults: list[Fault]) -> None:
        one.sentence = faults[0].sentence
        self._end(one, "failed")

    def _end(self, one: Download, state: State) -> None:
        one.number, one.state = 0, state
        self.changed.emit(one)
        if state == "done":
            self.finished.emit(one)
