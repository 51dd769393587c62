"""Whether a training run's folder is still where it was, and still its own: people move, rename and delete folders, and lock files.

The trainer's open files go with a folder that is moved, while everything it writes by name would miss it. So it looks again and again, by
the folder's identity and not its name: where it was moved to, whether it is gone, and whether another process has taken it over after
its lock file was deleted (an flock is of the file, not of its name).
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backend.config.config import Config
from backend.runs.events import EventLog, JsonLines
from backend.runs.run_folder import RunFolder
from backend.trainer.control import Control, Stopped
from backend.trainer.memory.model_shape import ModelShape
from backend.trainer.memory.phases import MemoryModel
from backend.utils import file_lock
from backend.utils.disk_faults import LONGEST_PLACE, Room, gigabytes, room_on
from backend.utils.text import quote
from backend.utils.whole_file import replace_file

LOOK_EVERY_S = 0.3
_LONGEST_PATH = 1024
"""Bytes that F_GETPATH writes (MAXPATHLEN of macOS)."""


@dataclass(frozen=True, slots=True)
class FolderPlace:
    """What became of the folder. `path`: where it is now; of one that is deleted, taken or out of reach, where it was."""

    state: Literal["here", "moved", "deleted", "out of reach", "taken"]
    path: Path


class RunFolderGuard:
    """`run` is a folder whose lock this process holds, `event log` the file that it alone appends to."""

    def __init__(
        self, run: RunFolder, event_log: EventLog, completions: JsonLines, warn: Callable[[str], None]
    ) -> None:
        self._run, self._event_log, self._warn = run, event_log, warn
        self._logs = (event_log, completions)
        self._settings = run.config.read_bytes() if run.config.is_file() else None
        self._folder = os.open(run.path, os.O_RDONLY)
        self._lock = _identity(run.lock)
        self._second_lock: int | None = None
        self._looked = time.monotonic()

    def look(self) -> None:
        """Now and then look where the folder is, and whether what is appended to is still found by its name. Raises Stopped where the folder is
        not as it was; `place` tells then. Raises DiskError."""
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            if (place := self.place()).state != "here":
                raise Stopped(f"its folder was {place.state}")
            self._put_back()

    def _put_back(self) -> None:
        for log in self._logs:
            if not log.has_its_name():
                log.recreate()
                self._warn(
                    f"{log.path.name} was deleted or replaced while the run trains. It was written again as the run knows it."
                )
        if self._settings is not None and not self._run.config.exists():  # no run can be resumed without it
            replace_file(self._run.config, [self._settings])
            self._warn(
                f"{self._run.config.name} was deleted while the run trains. It was written again as it was before."
            )

    def place(self) -> FolderPlace:
        """Where the folder is, and whether it is still this process's."""
        try:
            about = os.fstat(self._folder)
        except OSError:  # of a disk that is gone, or of a folder that was deleted on a server
            return FolderPlace("out of reach", self._run.path)
        if (found := _identity(self._run.path)) is None or found != (about.st_dev, about.st_ino):
            if about.st_nlink and (now := _path_of(self._folder)) is not None:
                return FolderPlace("moved", now)
            is_deleted = not about.st_nlink or _disk_of(self._run.path.parent) == about.st_dev
            return FolderPlace("deleted" if is_deleted else "out of reach", self._run.path)
        if not self._run.config.exists() and not self._run.events.exists():
            return FolderPlace("deleted", self._run.path)  # all that was in it
        return FolderPlace("taken" if self._is_taken() else "here", self._run.path)

    def _is_taken(self) -> bool:
        if self._lock is None or _identity(self._run.lock) == self._lock:
            return False
        # Deleted or replaced: what holds this process's lock is a file without a name. Whoever came meanwhile holds the new file, or has
        # ended again and left other lines in the event log.
        handle = file_lock.try_hold(self._run.lock)
        if handle is None or self._has_other_lines():
            if handle is not None:
                os.close(handle)
            return True
        if self._second_lock is not None:
            os.close(self._second_lock)
        self._second_lock, self._lock = handle, _identity(self._run.lock)
        self._warn(
            "run.lock was deleted while the run trains. It was made again; no other process has taken the run over."
        )
        return False

    def _has_other_lines(self) -> bool:
        try:
            return self._run.events.stat().st_size != self._event_log.size
        except OSError:
            return False  # it was deleted too

    def close(self) -> None:
        os.close(self._folder)
        if self._second_lock is not None:
            os.close(self._second_lock)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None where there is no such file."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _disk_of(path: Path) -> int | None:
    """The device's number; None where there is no such file."""
    identity = _identity(path)
    return identity[0] if identity else None


def _path_of(folder: int) -> Path | None:
    """Where an open folder is now; None where the system cannot say."""
    try:
        if sys.platform == "darwin":
            named = fcntl.fcntl(folder, fcntl.F_GETPATH, bytes(_LONGEST_PATH))
            path = Path(os.fsdecode(named.rstrip(b"\0")))
        else:
            path = Path(os.readlink(f"/proc/self/fd/{folder}"))
        return path if os.path.samestat(path.stat(), os.fstat(folder)) else None
    except OSError:
        return None


RESERVED_FILES = 32
"""Files that a save makes, and more."""
CHECK_EVERY_S = 2.0
"""Seconds between two looks at the disk while waiting."""


class DiskSpaceGuard:
    """The room that one run needs. A user who says “resume” while it waits knows better, and is not asked again before there was room."""

    def __init__(self, run: RunFolder, event_log: EventLog, control: Control) -> None:
        self._run, self._event_log, self._control = run, event_log, control
        self._is_overruled = False

    def wait(self, needed: Callable[[], int] = lambda: 0) -> None:
        """Return once there is room for `needed` bytes beside the reserve; paused until then. Raises Stopped where it was asked to stop meanwhile."""
        lacks = self._lacking(needed() + RESERVE)
        if not lacks:
            self._is_overruled = False
            return
        if self._is_overruled or self._control.stop_requested:
            return
        self._event_log.write("note", level="warning", sentence=lacks, during="pause")
        looked = time.monotonic()

        def is_over() -> bool:
            nonlocal looked
            if time.monotonic() - looked < CHECK_EVERY_S:
                return False
            looked = time.monotonic()
            return not self._lacking(needed() + RESERVE)

        is_over_by_itself = self._control.pause_until(is_over, lacks)
        self._is_overruled = not is_over_by_itself
        if is_over_by_itself:
            again = "There is room on the disk again; the run goes on."
            self._event_log.write("note", level="info", sentence=again, during="pause")
        self._control.obey()

    def _lacking(self, needed: int) -> str:
        """A sentence on what the disk lacks; "" where it lacks nothing."""
        room = room_on(self._run.path)
        if room is None or (room.bytes >= needed and _has_files(room)):
            return ""
        where = f"The disk of {quote(self._run.path, LONGEST_PLACE)}"
        if not _has_files(room):
            return f"{where} has room for {room.files} more files only. The run is paused until there are more."
        return f"{where} has {gigabytes(room.bytes)} free, and {gigabytes(needed)} are needed. The run is paused until there is room."


def _has_files(room: Room) -> bool:
    return room.files is None or room.files >= RESERVED_FILES


RESERVE = 16 << 20
"""Bytes that are kept free for the event log, the completions and the log."""


def run_bytes(config: Config, shape: ModelShape) -> int:
    """About the bytes of a run's checkpoints, adapters and model, the most that there are at once; the event log and its completions apart.

    The newest `keep_checkpoints`, one that is being written beside them, and the best. A model at the end takes its size twice only where it
    replaces one, which a new run does not.
    """
    memory = MemoryModel(config, shape, prompt=1, gpu=False)
    trainable = memory.trainable()
    sizes = {allocation.name: allocation.bytes for allocation in memory.persistent()}
    checkpoint = (
        trainable
        + (0 if config.save_only_model else sizes.get("optimizer", 0))
        + (trainable if config.sync_ref_model else 0)
    )
    saves = -(-config.iters // config.save_every)
    checkpoints = min(saves, config.keep_checkpoints + 2) * checkpoint
    full = config.train_type == "full"
    writes_model = full or config.fuse
    return checkpoints + (0 if full else trainable) + (shape.weights if writes_model else 0)
