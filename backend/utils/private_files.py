"""Folders and files that only their owner can read: runs, preferences, what is worked on.

They hold prompts, completions and settings of a person's work, and a machine may have other users. Modes are set after the creation, so they
hold under every umask. A folder that a person has made and named, such as one shared by a team, is left as it is: the run folders
in it are private all the same.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

OWNER_ONLY = 0o700


def make_private_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder, and every missing one above it, for this user alone. Raises OSError as `Path.mkdir` does."""
    for parent in reversed([parent for parent in path.parents if not parent.exists()]):
        _make(parent, exist_ok=True)
    _make(path, exist_ok=exist_ok)


def _make(path: Path, *, exist_ok: bool) -> None:
    was_there = path.is_dir()
    path.mkdir(mode=OWNER_ONLY, exist_ok=exist_ok)
    if not was_there:
        restrict_to_user(path)


def restrict_to_user(path: Path) -> None:
    """Take the rights to a file or folder from everybody but its owner. What is not ours, is a link, or lies on a disk without rights stays
    as it is."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        wanted = stat.S_IMODE(status.st_mode) & OWNER_ONLY
        is_ours = status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)
        if is_ours and stat.S_IMODE(status.st_mode) != wanted:
            path.chmod(wanted)
