"""The folders in which scoring processes work, in the system's folder of temporary files. One that a killed trainer has left goes with
the next start."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from backend.spec import file_lock
from backend.spec.process_ids import is_alive

FOLDER_PREFIX = "grpo-studio-rewards-"
"""After it come the number of the trainer's process, and letters."""


def make_working_folder() -> tuple[Path, int]:
    """A new folder, and the handle that keeps it: it is locked as long as that is open, however this process ends. Raises OSError."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # without locks only the process's number tells that it is in use
        file_lock.take(handle)
    return folder, handle


def remove_abandoned() -> None:
    """Delete this user's folders whose trainers are gone. Neither sign is enough alone: the number may belong to another system that shares the
    folder of temporary files, and a folder is made an instant before it is locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        number = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        with suppress(OSError):
            is_ours = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if is_ours and number.isdecimal() and not is_alive(int(number)) and not file_lock.is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)
