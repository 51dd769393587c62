"""Locks on files that die with their process (flock): who holds one is alive, and no pid is trusted."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

CREATED = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # of a lock's file: no link, no wait at a pipe


def is_held(path: Path) -> bool:
    """True if a process holds this lock; False for a missing file and on a file system without locks."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Shared: two processes that look at the same time do not take each other for the holder.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # without locks, where `hold_lock` lets nobody train
        return False
    finally:
        os.close(handle)
    return False


def try_hold(path: Path) -> int | None:
    """A handle that holds the lock until closed; None if another process has it. Creates the file. Raises OSError."""
    while True:
        handle = os.open(path, CREATED, 0o600)
        try:
            is_taken = take(handle)
        except OSError:
            os.close(handle)
            raise
        if is_taken and leads_to(path, handle):
            return handle
        os.close(handle)  # held, or deleted after it was opened: a lock on a file that nobody else will open
        if not is_taken:
            return None


def leads_to(path: Path, handle: int) -> bool:
    """True if an open file is still the one of this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def take(handle: int) -> bool:
    """Try to take the lock on an open file. Raises OSError on a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def held(path: Path) -> Generator[None]:
    """Hold the lock for the block, waiting for it. Raises OSError where the file cannot be made."""
    handle = os.open(path, CREATED, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_alive(pid: int) -> bool:
    """True if there is a process of this number, whoever's it is by now."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
