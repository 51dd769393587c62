"""A folder is written completely or not at all, and two exports of one target cannot meet in its staging folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from backend.export import atomic_folder
from backend.utils.errors import UserError


def test_a_folder_deleted_between_opening_and_locking_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export before this one ends at that very moment: a lock on its deleted folder would guard nothing."""
    lock, deleted = atomic_folder._lock, []

    def deleted_meanwhile(handle: int, target: Path, made_by: str) -> None:
        if not deleted:
            deleted.append(os.fstat(handle).st_ino)
            (tmp_path / ".grpo-studio-mine").rmdir()
        lock(handle, target, made_by)

    monkeypatch.setattr(atomic_folder, "_lock", deleted_meanwhile)
    with atomic_folder.staging_folder(tmp_path, tmp_path / "mine") as staging:
        (staging / "new").mkdir()
        with (
            pytest.raises(UserError, match="another process"),
            atomic_folder.staging_folder(tmp_path, tmp_path / "mine"),
        ):
            pass
    assert deleted and not list(tmp_path.iterdir())


def test_a_folder_deleted_before_it_is_opened_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, failures = os.open, []

    def gone_once(path: Path, flags: int) -> int:
        if not failures:
            failures.append(path)
            Path(path).rmdir()
        return opened(path, flags)

    monkeypatch.setattr(os, "open", gone_once)
    with atomic_folder.staging_folder(tmp_path, tmp_path / "mine") as staging:
        assert staging.is_dir() and failures == [staging]


def test_a_parent_that_cannot_be_written_or_is_gone_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=f"{tmp_path}/gone is not there"),
        atomic_folder.staging_folder(tmp_path / "gone", tmp_path / "mine"),
    ):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="cannot be written: Not a directory"),
        atomic_folder.staging_folder(tmp_path / "file", tmp_path / "mine"),
    ):
        pass


def test_folders_are_equal_by_the_bytes_of_their_files(tmp_path: Path) -> None:
    new, target = tmp_path / "new", tmp_path / "target"
    new.mkdir()
    (new / "config.json").write_text("{}")
    assert not atomic_folder.are_equal(new, target)
    shutil.copytree(new, target)
    assert atomic_folder.are_equal(new, target)
    (target / "config.json").write_text("[]")
    os.utime(target / "config.json", ns=(0, (new / "config.json").stat().st_mtime_ns))  # of the same size and time
    assert not atomic_folder.are_equal(new, target)
    shutil.copy(new / "config.json", target)
    (target / "more").touch()
    assert not atomic_folder.are_equal(new, target)
