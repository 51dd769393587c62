"""The handle of one question: its handler reports progress through it, and notices a cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Cancelled(Exception):
    """The question was cancelled. A handler lets it pass, and leaves everything on disk sound."""


class QuestionCall:
    """Handed to every handler. `report` sends progress; `check` raises Cancelled once the question was cancelled."""

    def __init__(self, report: Callable[[dict[str, Any]], None] = lambda progress: None) -> None:
        self.report = report
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raises Cancelled once the question was cancelled. To be called between two pieces of work."""
        if self.is_cancelled:
            raise Cancelled

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until the question is cancelled. Raises Cancelled."""
        if self._cancelled.wait(seconds):
            raise Cancelled

    def cancel(self) -> None:
        """Called by the server, from another thread than the handler's."""
        self._cancelled.set()
