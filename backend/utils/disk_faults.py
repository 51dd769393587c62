"""Files that could not be written: which one, and why, in plain words; and space on disks.

Code that writes a file of a run does so inside `writing`. A full disk is no bug: the run ends with a message and exit
code 2, its last checkpoint stands, and it can be resumed once there is room.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from backend.utils.errors import UserError
from backend.utils.files import reason
from backend.utils.text import quote

LONGEST_PLACE = 110

CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EIO: "the disk reported an input/output error",
    errno.EROFS: "the disk is read-only",
    errno.EFBIG: "the file is larger than the system allows",
    errno.ESTALE: "the network disk is not there any more",
    errno.ENODEV: "the disk is not there any more",
    errno.ENXIO: "the disk is not there any more",
    errno.EACCES: "permission is denied",
    errno.EPERM: "permission is denied",
    errno.ENOENT: "its folder is not there any more",
    errno.ENOTDIR: "a file of its folder's name is in the way",
    errno.EEXIST: "a file of its folder's name is in the way",
    errno.EISDIR: "a folder of that name is in the way",
    errno.EMFILE: "this process has too many files open",
    errno.ENFILE: "the system has too many files open",
}

OF_DISKS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE, errno.EMFILE, errno.ENFILE),
)  # errors that no program can cause by a wrong call: wherever they come from, the disk or its limits are at fault
MLX_WRITING = ("[write]", "[save_safetensors]", "[save]", "[load] Failed to write")
"""Beginnings of mlx's RuntimeErrors for a file that it could not write; they keep no errno."""


class DiskError(UserError):
    """A file could not be written. Its setting is "disk"."""

    def __init__(self, sentence: str) -> None:
        super().__init__("disk", sentence)


def disk_fault(path: Path, error: BaseException) -> DiskError:
    """The error for a file that could not be written because of `error`."""
    return DiskError(f"{quote(path, LONGEST_PLACE)} cannot be written: {cause(error)}.")


def cause(error: BaseException) -> str:
    """Why a file could not be written, as the end of a sentence."""
    if not isinstance(error, OSError):
        return f"mlx reports {quote(str(error).rstrip('.'))}"
    return CAUSES.get(error.errno or 0) or reason(error)


def is_of_mlx(error: RuntimeError) -> bool:
    """True if mlx could not write a file; its other RuntimeErrors are about the GPU or the arrays."""
    return str(error).startswith(MLX_WRITING)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn errors of the block, which writes `path`, into DiskError naming it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_of_mlx(error):
            raise
        raise disk_fault(path, error) from error


@contextmanager
def disk_errors_of(path: Path) -> Generator[None]:
    """As `writing`, for a block that reads and computes too: passes on what may be a missing file or a bug."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if fault_of(error) is None:
            raise
        raise disk_fault(path, error) from error


def fault_of(error: BaseException) -> DiskError | None:
    """The disk's fault behind an error of code that does not use `writing`; None for what may be a bug."""
    if isinstance(error, RuntimeError) and is_of_mlx(error):
        return DiskError(f"A file cannot be written: {cause(error)}.")
    if not isinstance(error, OSError) or error.errno not in OF_DISKS:
        return None
    if not isinstance(error.filename, str | bytes):
        return DiskError(f"A file cannot be written: {cause(error)}.")
    return DiskError(f"{quote(Path(os.fsdecode(error.filename)), LONGEST_PLACE)} cannot be used: {cause(error)}.")


@dataclass(frozen=True, slots=True)
class Room:
    """What a user without special rights may still write to a disk; `files` is None without such a limit."""

    bytes: int
    files: int | None


def room_on(folder: Path) -> Room | None:
    """Room on the disk of `folder`, which need not exist yet; None where the system does not say."""
    try:
        about = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    except (OSError, StopIteration):
        return None
    return Room(about.f_bavail * about.f_frsize, about.f_favail if about.f_files else None)


def require_room(path: Path, needed: int, what: str) -> None:
    """Raise DiskError unless the disk of `path` has `needed` bytes free for `what`, as far as the system says."""
    room = room_on(path)
    if room is not None and room.bytes < needed:
        where = f"on the disk of {quote(path, LONGEST_PLACE)}, which has {gigabytes(room.bytes)} free"
        raise DiskError(f"{what} needs {gigabytes(needed)} {where}.")


def gigabytes(size: float) -> str:
    """A number of bytes for people, in decimal units as systems show disks, with three digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= 0.9995 * factor:  # what would be 1000 of the next unit
            return f"{size / factor:.3g} {unit}" if size < 999.5 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size / 1e3:.3g} kB"
