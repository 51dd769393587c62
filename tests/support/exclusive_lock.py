"""Who may be at work at the same time, when tests run in several processes: many that only compute, or one that measures."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


class Floor:
    """A lock that any number of tests share, or one has alone, over all workers of one run (pytest-xdist).

    Whoever comes passes a turnstile first, and who waits to be alone keeps it: otherwise those who share would come and go
    without end.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder` None: there is one process, and nothing to share."""
        self._files = [] if folder is None else [(folder / name).open("w") for name in ("turnstile", "floor")]

    @classmethod
    @cache
    def shared_by_workers(cls) -> Floor:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        if run is None:
            return cls(None)
        folder = Path(tempfile.gettempdir()) / f"grpo-studio-floor-{run}"
        folder.mkdir(exist_ok=True)
        return cls(folder)

    @contextmanager
    def taken(self, *, alone: bool) -> Iterator[None]:
        if not self._files:
            yield
            return
        turnstile, floor = self._files
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(floor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(floor, fcntl.LOCK_UN)
