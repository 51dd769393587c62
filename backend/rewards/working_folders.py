"""Temporary folders for untrusted processes; abandoned ones are removed later."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from backend.utils import file_lock
from backend.utils.file_lock import is_alive

FOLDER_PREFIX = "grpo-studio-rewards-"
"""Followed by the creator's pid."""


def make_working_folder() -> tuple[Path, int]:
    """A new folder and its lock's descriptor. Raises OSError."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        file_lock.take(handle)
    return folder, handle


def remove_abandoned() -> None:
    """Remove this user's folders of dead processes.

    Needs both a dead pid and no lock: the folder may be shared with another system, or not locked yet.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        number = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        with suppress(OSError):
            is_ours = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if is_ours and number.isdecimal() and not is_alive(int(number)) and not file_lock.is_held(folder):
                remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder of any depth. Never raises."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        with suppress(OSError):  # rm has no recursion limit
            subprocess.run(["rm", "-rf", "--", str(folder)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
