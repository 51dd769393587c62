"""What a run says in its log before its first step: how far its process has come with rows and weights."""

from __future__ import annotations

import os
from pathlib import Path

from app.model.runs.run_files import last_lines
from backend.spec.runs.start_progress import StartProgress

READ = 4096
"""Bytes at the end of the log that are looked at, however long it is."""


class StartLog:
    """The end of one log, looked at when the file has changed.

    Attributes:
        progress – what the log's last line says; None where that is another line.
        written – unix seconds of the last change; 0 where there is no log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self.progress: StartProgress | None = None
        self.written = 0.0

    def look(self) -> bool:
        """→ whether the log says something else than at the last look."""
        try:
            about = os.stat(self._path)
            stamp, self.written = (about.st_mtime_ns, about.st_size), about.st_mtime
        except OSError:
            stamp, self.written = None, 0.0
        if stamp == self._stamp:
            return False
        self._stamp, before = stamp, self.progress
        text = last_lines(self._path, READ).decode(errors="replace")
        last = next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")
        self.progress = StartProgress.read(last)
        return self.progress != before
