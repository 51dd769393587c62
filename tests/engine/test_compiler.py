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


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        ("", "g++ is not installed, so compiled functions run one operation at a time"),
        ("[ $1 = --version ] || { echo cmath: No such file >&2; exit 1; }", "g++ is installed but cannot compile"),
    ],
    ids=["none", "broken"],
)
def test_without_a_working_compiler_functions_run_uncompiled(tmp_path: Path, compiler: str, says: str) -> None:
    """mlx asks g++ for its version only, and then raised at the first compiled function, in the middle of a run."""
    programs, temporary = tmp_path / "bin", tmp_path / "tmp"
    programs.mkdir()
    temporary.mkdir()
    (programs / "sh").symlink_to(shutil.which("sh") or "/bin/sh")
    if compiler:
        (programs / "g++").write_text(f"#!/bin/sh\n{compiler}\n")
        (programs / "g++").chmod(0o755)
    environment = os.environ | {"PATH": str(programs), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", PREPARE_AND_COMPUTE]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sentence, result = done.stdout.splitlines()
    assert sentence.startswith(says) and result == "0.0"
