"""What tests leave in the temporary folder goes with the pytest that ran them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAVES_FOLDERS = """
import multiprocessing.util, subprocess, sys, tempfile
def test_it():
    multiprocessing.util.get_temp_dir()
    tempfile.mkdtemp()
    subprocess.run([sys.executable, "-c", "import os, tempfile; tempfile.mkdtemp(); os._exit(1)"])
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_is_left_but_what_the_next_session_uses(workers: int, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LEAVES_FOLDERS)
    (tmp_path / "tmp").mkdir()
    without = ("PYTEST_", "TMPDIR")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n", str(workers)]
    done = subprocess.run(
        [*command, str(tmp_path / "test_it.py")],
        env=environment | {"TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout and not done.stderr, done.stdout + done.stderr
    left = {path.name for path in (tmp_path / "tmp").iterdir()}
    assert {name for name in left if not name.startswith("pytest-of-")} <= {"mlx", "grpo-studio-gw0"}
