"""Disk use of a run, and sizes as people read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backend.runs.disk_use import disk_use
from backend.runs.run_folder import RunFolder
from backend.utils.disk import gigabytes
from backend.utils.files import remove_tree, require_plain_files


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 kB"), (999_400, "999 kB"), (999_500, "1 MB"), (12_340_000, "12.3 MB"), (999.4e6, "999 MB"), (999.6e6, "1 GB"),
        (1e9, "1 GB"), (999.4e9, "999 GB"), (999.6e9, "1 TB"), (1e12, "1 TB"), (1.25e12, "1.25 TB"), (1234e12, "1,234 TB"),
    ],
)  # fmt: skip
def test_a_size_has_three_digits_and_no_exponent(size: float, text: str) -> None:
    assert gigabytes(size) == text


def test_folders_of_any_depth_are_counted_walked_and_deleted(tmp_path: Path) -> None:
    """os.walk and shutil.rmtree of Python 3.11 recurse, and a path has at most 4,096 bytes."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.log.write_text("log")
    here = os.open(run.path, os.O_RDONLY)
    for _ in range(3_000):
        os.mkdir("a", dir_fd=here)
        below = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert disk_use(run) == {"log.txt": 3}
    require_plain_files(run.path)
    remove_tree(run.path)
    assert not run.path.exists()
