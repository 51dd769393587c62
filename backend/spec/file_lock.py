"""Locks on files that die with their process (flock): who holds one is alive, and no pid is trusted."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def is_held(path: Path) -> bool:
    """Whether a process holds this lock. A missing file is held by nobody; nothing is created."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Shared: two processes that look at the same time do not take each other for the holder.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def try_hold(path: Path) -> int | None:
    """Take the lock until this process ends or the returned handle is closed; None where another holds it.

    Creates the file. Raises OSError where that cannot be done.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if take(handle):
        return handle
    os.close(handle)
    return None


def take(handle: int) -> bool:
    """Try to take the lock on an open file; returns whether this process holds it now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def held(path: Path) -> Generator[None]:
    """Hold the lock for the block, waiting for it as long as another holds it. Raises OSError where the file cannot be made."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
