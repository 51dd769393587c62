"""Without a compiler, or with a broken one, compiled functions still work, and a sentence says that they are not
compiled.

Each case is a process of its own, with a temporary folder of its own, for mlx keeps what it compiled in both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backend.engine import cpu
from backend.engine.device import on_cpu

ROOT = Path(cpu.__file__).parents[2]
PREPARE_AND_COMPUTE = """
import mlx.core as mx
early = mx.compile(lambda x: mx.sin(x) * 2 + x)
from backend.engine import cpu
print(cpu.check_compiler())
print(early(mx.zeros((3, 5))).sum().item())
"""

pytestmark = pytest.mark.skipif(not on_cpu(), reason="a GPU needs no compiler of the system")


def output_with(programs: Path, temporary: Path) -> list[str]:
    """Lines printed by a process that finds no programs but those in a folder."""
    programs.mkdir(exist_ok=True)
    temporary.mkdir()
    (programs / "sh").symlink_to(shutil.which("sh") or "/bin/sh")
    environment = os.environ | {"PATH": str(programs), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE_AND_COMPUTE], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_no_compiler_is_told_and_functions_run_uncompiled(tmp_path: Path) -> None:
    sentence, result = output_with(tmp_path / "bin", tmp_path / "tmp")
    assert sentence.startswith("g++ is not installed, so compiled functions run one operation at a time")
    assert result == "0.0"


def test_a_compiler_that_fails_is_told_and_functions_run_uncompiled(tmp_path: Path) -> None:
    """mlx asks g++ for its version only, and then raised at the first compiled function, in the middle of a run."""
    broken = tmp_path / "bin" / "g++"
    broken.parent.mkdir()
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "cmath: No such file or directory" >&2; exit 1; }\n')
    broken.chmod(0o755)
    sentence, result = output_with(broken.parent, tmp_path / "tmp")
    assert sentence.startswith("g++ is installed but cannot compile")
    assert result == "0.0"
