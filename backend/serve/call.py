"""One question that was asked: what its handler may say while it works, and how it hears that nobody wants to know."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Cancelled(Exception):
    """The question was taken back; the handler leaves everything sound and ends."""


class QuestionCall:
    """Handed to every handler. `tell` sends progress; `check` raises Cancelled once the question was taken back."""

    def __init__(self, tell: Callable[[dict[str, Any]], None] = lambda progress: None) -> None:
        self.tell = tell
        self._taken_back = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._taken_back.is_set()

    def check(self) -> None:
        """Raises Cancelled once the question was taken back. To be called between two pieces of work."""
        if self.cancelled:
            raise Cancelled

    def rest(self, seconds: float) -> None:
        """Wait, but not once the question was taken back. Raises Cancelled."""
        if self._taken_back.wait(seconds):
            raise Cancelled

    def take_back(self) -> None:
        self._taken_back.set()
