"""Ranks of one machine compile CPU kernels into folders of their own, and find there what is whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from backend.engine.cpu import kernel_folder
from backend.engine.device import on_cpu

RANK = """
import sys
from backend.engine.cpu import kernel_folder
print(kernel_folder.use_own_folder(), flush=True)
if "compile" in sys.argv:
    import mlx.core as mx
    mx.set_default_device(mx.cpu)
    mx.eval(mx.compile(lambda x: mx.exp(x) * 3 + mx.sin(x))(mx.zeros((2, 3))))
sys.stdin.read()
"""


def started(temporary: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"TMPDIR": str(temporary)}
    return subprocess.Popen(
        [sys.executable, "-c", RANK, *words], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_no_two_processes_compile_into_one_folder_and_the_next_finds_it_again(tmp_path: Path) -> None:
    library = tmp_path / "mlx" / "0.1" / "cpu" / "libwhole.so"
    library.parent.mkdir(parents=True)
    for name in ("libwhole.so", "libhalf.so"):
        (library.parent / name).write_text(name)
    os.utime(library, (0, time.time() - 2 * kernel_folder.SETTLED_S))
    first, second = started(tmp_path), started(tmp_path)
    assert first.stdout is not None and second.stdout is not None
    folders = {Path(each.readline().strip()) for each in (first.stdout, second.stdout)}
    assert folders == {tmp_path / "mlx" / "rank-1", tmp_path / "mlx" / "rank-2"}
    for folder in folders:
        assert [path.name for path in folder.rglob("*.so")] == ["libwhole.so"], "what may still be written is left"
    for each in (first, second):
        each.communicate(timeout=30)
    third = started(tmp_path, "compile")
    assert third.communicate(timeout=60)[0].strip() == str(tmp_path / "mlx" / "rank-1")
    compiled = [path for path in (tmp_path / "mlx").rglob("*.so") if path.name not in ("libwhole.so", "libhalf.so")]
    assert compiled or not (on_cpu() and shutil.which("g++"))
    assert all(path.is_relative_to(tmp_path / "mlx" / "rank-1") for path in compiled)


def test_pythons_own_temporary_files_stay_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    own = kernel_folder.use_own_folder()
    assert own is not None and os.environ["TMPDIR"] == str(own) and tempfile.gettempdir() == str(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    (tmp_path / "none").write_text("a file in the place of the folder")
    assert kernel_folder.use_own_folder() is None
