"""Which files are put on disk (fsync) before a rename gives them the name by which they are found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def synced_before_renames(monkeypatch: pytest.MonkeyPatch, final: Path) -> set[int]:
    """The inodes of what is synced from now on until something is renamed to `final`; the set grows as that happens."""
    synced: set[int] = set()
    is_renamed = False
    fsync, rename = os.fsync, Path.rename

    def noting(handle: int) -> None:
        fsync(handle)
        if not is_renamed:
            synced.add(os.fstat(handle).st_ino)

    def renaming(self: Path, target: Path) -> Path:
        nonlocal is_renamed
        is_renamed = is_renamed or target == final
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Path, "rename", renaming)
    return synced
