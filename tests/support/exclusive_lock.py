"""A reader-writer lock over the workers of a test run: many tests that compute, or one that measures seconds."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


class MachineLock:
    """Shared by any number of tests, or held exclusively by one."""

    def __init__(self, folder: Path | None) -> None:
        self._files = [] if folder is None else [(folder / name).open("w") for name in ("queue", "machine")]

    @classmethod
    @cache
    def of_this_run(cls) -> MachineLock:
        """The lock that all workers of this pytest-xdist run share."""
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        if run is None:
            return cls(None)
        folder = Path(tempfile.gettempdir()) / f"grpo-studio-lock-{run}"
        folder.mkdir(exist_ok=True)
        return cls(folder)

    @contextmanager
    def held(self, *, exclusive: bool) -> Iterator[None]:
        if not self._files:
            yield
            return
        queue, machine = self._files
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(machine, fcntl.LOCK_UN)
