"""Guards of a training run: its folder stays in place, and its disk has space for the next save."""

import fcntl
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from backend.config.config import Config
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder
from backend.trainer.control import Control, Stopped
from backend.trainer.memory.model_shape import ModelShape
from backend.trainer.memory.phases import MemoryModel
from backend.utils.disk import LONGEST_PLACE, gigabytes, room_on
from backend.utils.text import quote

LOOK_EVERY_S = 0.3


class RunFolderGuard:
    """Notices that the folder of a training run was moved, with its open files but not with new ones, or deleted."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._folder = os.open(run.path, os.O_RDONLY)
        self._looked = time.monotonic()

    def look(self) -> None:
        """Raise Stopped if the folder is not where it was; `place` has the details."""
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            if self.place() != self._run.path:
                raise Stopped("its folder was moved or deleted")

    def place(self) -> Path | None:
        """Where the folder is now; None for one that was deleted or emptied, or whose disk is gone."""
        with suppress(OSError):
            about = os.fstat(self._folder)
            if self._run.path.exists() and os.path.samestat(about, self._run.path.stat()):
                return self._run.path if self._run.config.exists() or self._run.events.exists() else None
            if sys.platform == "darwin":
                named = fcntl.fcntl(self._folder, fcntl.F_GETPATH, bytes(1024))  # MAXPATHLEN of macOS
                path = Path(os.fsdecode(named.rstrip(b"\0")))
            else:
                path = Path(os.readlink(f"/proc/self/fd/{self._folder}"))
            return path if about.st_nlink and os.path.samestat(path.stat(), about) else None
        return None

    def close(self) -> None:
        os.close(self._folder)


RESERVE = 16 << 20  # bytes kept free for the event log, the completions and the log


class DiskSpaceGuard:
    """Pauses a run while its disk is nearly full, before a save fails. A user who resumes it is not asked again."""

    def __init__(self, run: RunFolder, event_log: EventLog, control: Control) -> None:
        self._run, self._event_log, self._control = run, event_log, control
        self._is_overruled = False

    def wait(self, needed: int = 0) -> None:
        """Return once there is space for `needed` bytes and the reserve. Raises Stopped if asked to stop meanwhile."""
        lacks = self._lacking(needed + RESERVE)
        if not lacks:
            self._is_overruled = False
            return
        if self._is_overruled or self._control.stop_requested:
            return
        self._event_log.write("note", level="warning", sentence=lacks, during="pause")
        has_space = self._control.pause_until(lambda: not self._lacking(needed + RESERVE), lacks)
        self._is_overruled = not has_space
        if has_space:
            again = "There is space on the disk again; the run continues."
            self._event_log.write("note", level="info", sentence=again, during="pause")
        self._control.obey()

    def _lacking(self, needed: int) -> str:
        room = room_on(self._run.path)
        if room is None or room >= needed:
            return ""
        needs = f"{gigabytes(room)} free, and {gigabytes(needed)} are needed"
        where = quote(self._run.path, LONGEST_PLACE)
        return f"The disk of {where} has {needs}. The run is paused until there is room."


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
