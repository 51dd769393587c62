"""Opening what should be a file and may be something else: a run folder may come from somebody else.

A pipe would wait for a writer for ever, a device may do anything, and a link may lead out of the folder.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from backend.utils.errors import UserError
from backend.utils.files import kind_of
from backend.utils.text import quote


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """A file opened for reading; `buffering` as in `open`. Raises OSError as `open` does, and for whatever is not a regular file; never waits."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "It is not a file", str(path))
    return os.fdopen(handle, "rb", buffering)


def read_regular(path: Path) -> bytes:
    """A file's content. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def require_plain_files(folder: Path) -> None:
    """Raise UserError where a run's folder holds anything but files and folders, at any depth. Who writes to a run, deletes or copies parts of
    it would reach through a link what is no part of it, and wait at a pipe for ever. Nothing of ours makes either there."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            with suppress(FileNotFoundError):  # deleted meanwhile
                if sentence := _not_plain(path):
                    raise UserError("run", sentence)


def _not_plain(path: Path) -> str:
    """What is wrong with it; "" of a file or a folder. Raises FileNotFoundError."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"{quote(path)} is a link, and a run's own files are never links; put what it leads to in its place."
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return f"{quote(path)} is {kind_of(mode)}, and a run's folder holds only files and folders; move it away."
    return ""


def append_regular(path: Path) -> FileIO:
    """A file opened for appending, made where there is none. Raises OSError, also for a link and whatever is not a regular file; never
    waits."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "It is not a file", str(path))
    return FileIO(handle, "ab")
