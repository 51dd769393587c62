"""Disk use of a run, and sizes as people read them."""

from __future__ import annotations

import os
from pathlib import Path

from backend.runs.disk_use import disk_use
from backend.runs.run_folder import RunFolder
from backend.utils.disk import gigabytes
from backend.utils.files import remove_tree, require_plain_files


def test_a_size_has_three_digits_and_no_exponent() -> None:
    sizes = [0, 999_400, 999_500, 12_340_000, 999.4e6, 999.6e6, 999.6e9, 1.25e12, 1234e12]
    texts = ["0 kB", "999 kB", "1 MB", "12.3 MB", "999 MB", "1 GB", "1 TB", "1.25 TB", "1,234 TB"]
    assert list(map(gigabytes, sizes)) == texts


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
