"""Runs moved to the desktop's trash, and back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QFile

from backend.spec.faults import Mistake
from backend.spec.run_folder import RunFolder
from backend.spec.run_lock import hold_lock

_LINUX_FILES, _LINUX_INFO = "files", "info"
"""Folders of a trash can on Linux: https://specifications.freedesktop.org/trash-spec/1.0/."""


@dataclass(frozen=True, slots=True)
class TrashedRun:
    """Where a run was, and where it lies now; `trashed` is None where the desktop does not tell."""

    path: Path
    trashed: Path | None


def move_to_trash(run: RunFolder) -> TrashedRun:
    """Move a run to the trash. It is locked meanwhile, so that no trainer begins in it.

    Raises Mistake for a run that is being trained, and where the desktop has no trash for it.
    """
    handle = hold_lock(run)
    try:
        place = move_by_desktop(run.path)
    finally:
        os.close(handle)
    return TrashedRun(run.path, place if place != run.path and place.exists() else None)


def move_by_desktop(path: Path) -> Path:
    """Have the desktop move a folder to its trash; returns where it lies there, as far as the desktop tells. Raises Mistake."""
    file = QFile(str(path))
    if not file.moveToTrash():
        raise Mistake("run", f"{path} could not be moved to the trash: {file.errorString()}.")
    return Path(file.fileName())


def put_back(run: TrashedRun) -> None:
    """Move a run back out of the trash. Raises Mistake where its place is taken, or it is no longer in the trash."""
    if run.trashed is None or not run.trashed.exists():
        raise Mistake("run", f"{run.path.name} is no longer where it was put in the trash.")
    if run.path.exists():
        raise Mistake("run", f"{run.path} exists again; move that one away first.")
    if not QFile.rename(str(run.trashed), str(run.path)):  # copies where the trash is on another disk
        raise Mistake("run", f"{run.trashed} could not be moved back to {run.path}.")
    if run.trashed.parent.name == _LINUX_FILES:  # the trash would go on listing it
        (run.trashed.parents[1] / _LINUX_INFO / f"{run.trashed.name}.trashinfo").unlink(missing_ok=True)
