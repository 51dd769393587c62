"""The locks of a run, by which one process at a time trains it: the trainer's own, and that of a launcher of ranks.
Both are flocks, which end with their process; an exec or a launcher passes them on."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from backend.runs.run_folder import RunFolder
from backend.utils import file_lock
from backend.utils.errors import UserError
from backend.utils.files import require_plain_files

LOCK_VARIABLE = "GRPO_STUDIO_LOCK"  # the file descriptor of a lock from the program before this one
LAUNCH_VARIABLE = "GRPO_STUDIO_LAUNCHED"  # the folder of the run that this process or its launcher holds
LOCK_PATIENCE_S = 0.5  # a window that tests whether a run is alive holds its lock for an instant
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def hold_lock(run: RunFolder) -> int:
    """Lock the run for this process, until it ends or the returned handle is closed. Raises UserError."""
    handle = _held(run, run.lock)
    # `held_for_launch` takes the two locks in the other order, so that one of two processes sees the other.
    if os.environ.get(LAUNCH_VARIABLE) != str(run.path) and file_lock.is_held(run.launch_lock):
        os.close(handle)
        raise _is_trained(run)
    return handle


@contextmanager
def held_for_launch(run: RunFolder) -> Generator[None]:
    """Let only this process and those that it starts train the run. Raises UserError as `hold_lock`."""
    handle = _held(run, run.launch_lock)
    try:
        if file_lock.is_held(run.lock):
            raise _is_trained(run)
        os.environ[LAUNCH_VARIABLE] = str(run.path)
        yield
    finally:
        os.environ.pop(LAUNCH_VARIABLE, None)
        with suppress(OSError):  # the folder may be gone
            run.launch_lock.unlink()
        os.close(handle)


def _held(run: RunFolder, lock: Path) -> int:
    require_plain_files(run.path)
    until = time.monotonic() + LOCK_PATIENCE_S
    try:
        while (handle := file_lock.try_hold(lock)) is None:
            if time.monotonic() > until:
                raise _is_trained(run)
            time.sleep(0.01)
    except OSError as error:
        if error.errno in NO_LOCKS:
            cause = f"The run folder {run.path} is on a file system without locks ({error.strerror})"
            raise UserError("runs_dir", f"{cause}; choose a folder on another disk.") from None
        raise UserError("run", f"The run folder {run.path} cannot be written: {error.strerror}.") from None
    return handle


def _is_trained(run: RunFolder) -> UserError:
    return UserError("run", f"The run {run.name} is being trained by another process; stop that one first.")


def hand_on_lock(handle: int) -> None:
    """Keep the run locked over an exec of this process; see `inherited_lock`."""
    os.set_inheritable(handle, True)
    os.environ[LOCK_VARIABLE] = str(handle)


def inherited_lock(run: RunFolder) -> int | None:
    """The handle of this run's lock from the program before this one in the same process, else None."""
    try:
        handle = int(os.environ[LOCK_VARIABLE])
        # The number alone would prove nothing: the variable may have come from another process.
        if not os.path.samestat(os.fstat(handle), run.lock.stat()):
            return None
    except (KeyError, ValueError, OSError):
        return None
    del os.environ[LOCK_VARIABLE]
    os.set_inheritable(handle, False)
    return handle if file_lock.take(handle) else None
