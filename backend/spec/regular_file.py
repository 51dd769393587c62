"""Opening what should be a file and may be something else: a run folder may come from somebody else.

A pipe would wait for a writer for ever, a device may do anything, and a link may lead out of the folder.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from backend.spec.faults import Mistake
from backend.spec.user_input.text import shown


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


def refuse_links(folder: Path) -> None:
    """Raise Mistake where a run's folder holds a link, at any depth: who writes to the run, deletes or copies parts of it would reach
    something that is no part of it. Nothing of ours makes links there."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink():
                raise Mistake(
                    "run",
                    f"{shown(path)} is a link, and a run's own files are never links; put what it leads to in its place.",
                )
