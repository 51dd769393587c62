"""Temporary folders for untrusted processes; abandoned ones are removed later."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from backend.utils import file_lock
from backend.utils.file_lock import is_alive
from backend.utils.files import remove_tree

FOLDER_PREFIX = "grpo-studio-rewards-"  # followed by the creator's pid


def make_working_folder() -> tuple[Path, int]:
    """A new folder and its lock's descriptor, after abandoned folders are removed. Raises OSError."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        number = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        with suppress(OSError):
            is_ours = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            # A dead pid and no lock: the folder may be shared with another system, or not locked yet.
            if is_ours and number.isdecimal() and not is_alive(int(number)) and not file_lock.is_held(folder):
                remove_tree(folder)
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        file_lock.take(handle)
    return folder, handle
