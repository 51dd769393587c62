"""A folder is written completely or not at all, and two exports of one target cannot meet in its staging folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from backend.export import atomic_folder
from backend.utils.errors import UserError


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
