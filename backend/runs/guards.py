"""Guards of a training run: its folder stays in place, and its disk has space for the next save."""

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
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder
from backend.trainer.control import Control, Stopped
from backend.trainer.memory.model_shape import ModelShape
from backend.trainer.memory.phases import MemoryModel
from backend.utils.disk import LONGEST_PLACE, gigabytes, room_on
from backend.utils.text import quote

LOOK_EVERY_S = 0.3


@dataclass(frozen=True, slots=True)
class FolderPlace:
    """Where a run's folder is now; `path` is the old place of one that is deleted or out of reach."""

    state: Literal["here", "moved", "deleted", "out of reach"]
    path: Path


class RunFolderGuard:
    """Notices that the folder of a training run was moved or deleted: open files go with a moved folder, new files do
    not."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._folder = os.open(run.path, os.O_RDONLY)
        self._looked = time.monotonic()

    def look(self) -> None:
        """Raise Stopped if the folder is not where it was; `place` has the details."""
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            if (place := self.place()).state != "here":
                raise Stopped(f"its folder was {place.state}")

    def place(self) -> FolderPlace:
        try:
            about = os.fstat(self._folder)
        except OSError:  # of a disk that is gone, or of a folder that was deleted on a server
            return FolderPlace("out of reach", self._run.path)
        found = _identity(self._run.path)
        if found != (about.st_dev, about.st_ino):
            if about.st_nlink and (now := _path_of(self._folder)) is not None:
                return FolderPlace("moved", now)
            disk = _identity(self._run.path.parent)
            is_deleted = not about.st_nlink or (disk is not None and disk[0] == about.st_dev)
            return FolderPlace("deleted" if is_deleted else "out of reach", self._run.path)
        is_emptied = not self._run.config.exists() and not self._run.events.exists()
        return FolderPlace("deleted" if is_emptied else "here", self._run.path)

    def close(self) -> None:
        os.close(self._folder)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _path_of(folder: int) -> Path | None:
    try:
        if sys.platform == "darwin":
            named = fcntl.fcntl(folder, fcntl.F_GETPATH, bytes(1024))  # MAXPATHLEN of macOS
            path = Path(os.fsdecode(named.rstrip(b"\0")))
        else:
            path = Path(os.readlink(f"/proc/self/fd/{folder}"))
        return path if os.path.samestat(path.stat(), os.fstat(folder)) else None
    except OSError:
        return None


RESERVE = 16 << 20  # bytes kept free for the event log, the completions and the log
RESERVED_FILES = 32  # a save makes fewer
CHECK_EVERY_S = 2.0


class DiskSpaceGuard:
    """Pauses a run while its disk is nearly full, before a save fails. A user who resumes it is not asked again."""

    def __init__(self, run: RunFolder, event_log: EventLog, control: Control) -> None:
        self._run, self._event_log, self._control = run, event_log, control
        self._is_overruled = False

    def wait(self, needed: Callable[[], int] = lambda: 0) -> None:
        """Return once there is space for `needed` bytes and the reserve. Raises Stopped if asked to stop meanwhile."""
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

        has_space = self._control.pause_until(is_over, lacks)
        self._is_overruled = not has_space
        if has_space:
            again = "There is space on the disk again; the run continues."
            self._event_log.write("note", level="info", sentence=again, during="pause")
        self._control.obey()

    def _lacking(self, needed: int) -> str:
        room = room_on(self._run.path)
        has_files = room is None or room.files is None or room.files >= RESERVED_FILES
        if room is None or (room.bytes >= needed and has_files):
            return ""
        where = f"The disk of {quote(self._run.path, LONGEST_PLACE)}"
        if not has_files:
            return f"{where} has room for {room.files} more files only. The run is paused until there are more."
        needs = f"{gigabytes(room.bytes)} free, and {gigabytes(needed)} are needed"
        return f"{where} has {needs}. The run is paused until there is room."


def run_bytes(config: Config, shape: ModelShape) -> int:
    """Estimated bytes of a run's checkpoints, adapters and model at their most, without logs."""
    memory = MemoryModel(config, shape, prompt=1, gpu=False)
    trainable = memory.trainable()
    checkpoint = trainable + (trainable if config.moves_reference else 0)
    checkpoint += 0 if config.save_only_model else memory.optimizer()
    saves = -(-config.iters // config.save_every) if config.save_every > 0 else config.epochs or config.iters
    full = config.train_type == "full"
    model = shape.weights if full or config.fuse else 0
    # The newest `keep_checkpoints`, the one being written, and the best.
    return min(saves, config.keep_checkpoints + 2) * checkpoint + (0 if full else trainable) + model
