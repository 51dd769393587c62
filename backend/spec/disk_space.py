"""How much room there is on a disk. `room_on` is the one place that asks the system."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from backend.spec.disk_faults import LONGEST_PLACE, DiskFault
from backend.spec.user_input.text import shown


@dataclass(frozen=True, slots=True)
class Room:
    """What a user without special rights may still write to a disk."""

    bytes: int
    files: int | None
    """How many more files; None for a file system that has no such limit."""


def room_on(folder: Path) -> Room | None:
    """The room on the disk of `folder`, which need not exist yet; None where the system does not say."""
    try:
        about = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    except (OSError, StopIteration):
        return None
    return Room(about.f_bavail * about.f_frsize, about.f_favail if about.f_files else None)


def require_room(path: Path, needed: int, what: str) -> None:
    """Raise DiskFault unless the disk of `path` has `needed` bytes free for `what`, as far as the system says."""
    room = room_on(path)
    if room is not None and room.bytes < needed:
        raise DiskFault(
            f"{what} needs {gigabytes(needed)} on the disk of {shown(path, LONGEST_PLACE)}, which has "
            f"{gigabytes(room.bytes)} free."
        )


def gigabytes(size: float) -> str:
    """A number of bytes for people, in decimal units as systems show disks, with three digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= 0.9995 * factor:  # what would be 1000 of the next unit
            return f"{size / factor:.3g} {unit}" if size < 999.5 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size / 1e3:.3g} kB"
