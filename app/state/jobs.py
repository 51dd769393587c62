"""Downloads from the Hub that this window has started."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from PySide6.QtCore import QObject, Signal

from app.state.processes import Service
from backend.utils.errors import ConfigProblem

WINDOW_S = 6.0

State = Literal["running", "paused", "failed", "done"]


@dataclass(slots=True)
class Download:
    """Bytes `done` of `total`; `sentence`: why it failed."""

    id: str
    repo_type: str
    state: State = "running"
    phase: str = "asking"
    done: int = 0
    total: int | None = None
    sentence: str = ""
    number: int = 0
    samples: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def speed(self) -> float | None:
        """Bytes a second, or None."""
        if self.state != "running" or len(self.samples) < 2:
            return None
        (t0, first), (t1, last) = self.samples[0], self.samples[-1]
        return (last - first) / (t1 - t0) if t1 > t0 else None

    @property
    def remaining_s(self) -> float | None:
        speed = self.speed
        return (self.total - self.done) / speed if speed and self.total is not None else None


class Downloads(QObject):
    changed = Signal(object)  # Download
    finished = Signal(object)  # Download

    def __init__(self, service: Service, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._service = service
        self._downloads: dict[tuple[str, str], Download] = {}

    def of(self, repo_type: str) -> list[Download]:
        return [each for each in self._downloads.values() if each.repo_type == repo_type and each.state != "done"]

    def start(self, repo_type: str, id_: str) -> Download:
        """Start a download, or resume one that was paused or failed."""
        download = self._downloads.setdefault((repo_type, id_), Download(id_, repo_type))
        if download.number:
            return download
        download.state, download.phase, download.sentence = "running", "asking", ""
        download.samples.clear()

        def on_refused(problems: list[ConfigProblem]) -> None:
            download.sentence = problems[0].sentence
            self._end(download, "failed")

        download.number = self._service.ask(
            "download",
            lambda _: self._end(download, "done"),
            on_refused=on_refused,
            on_progress=lambda progress: self._on_progress(download, progress),
            owner=self,
            id=id_,
            repo_type=repo_type,
        )
        self.changed.emit(download)
        return download

    def pause(self, download: Download) -> None:
        if download.number:
            self._service.cancel(download.number)
            self._end(download, "paused")

    def discard(self, download: Download) -> None:
        self.pause(download)
        self._downloads.pop((download.repo_type, download.id), None)
        download.state = "done"
        self._service.ask("discard", lambda _: None, id=download.id, repo_type=download.repo_type)
        self.changed.emit(download)

    def _on_progress(self, download: Download, progress: dict[str, Any]) -> None:
        download.phase, download.done = progress["phase"], progress["done"]
        download.total = progress["total"] or download.total
        if download.phase == "downloading":
            download.samples.append((time.monotonic(), download.done))
            while download.samples[-1][0] - download.samples[0][0] > WINDOW_S:
                download.samples.popleft()
        self.changed.emit(download)

    def _end(self, download: Download, state: State) -> None:
        download.number, download.state = 0, state
        self.changed.emit(download)
        if state == "done":
            self.finished.emit(download)
