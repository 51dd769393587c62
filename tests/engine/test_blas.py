"""OpenBLAS replaces the BLAS of mlx, only on Linux and only before mlx is imported, and the sentence reported is correct.

Each case runs in its own process, since a library cannot be unloaded.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend.engine.cpu import blas

ROOT = Path(blas.__file__).parents[3]
PREPARE = "from backend.engine.cpu import blas; print(blas.prepare())"
MULTIPLY = "import mlx.core as mx; a = mx.ones((64, 64)); mx.eval(a @ a)"


def openblas_is_installed() -> bool:
    try:
        ctypes.CDLL(blas.LIBRARY)
    except OSError:
        return False
    return True


linux = pytest.mark.skipif(sys.platform != "linux", reason="BLAS is chosen on Linux only")
with_openblas = pytest.mark.skipif(not openblas_is_installed(), reason=f"{blas.LIBRARY} is not installed")


def output_of(*lines: str, **environment: str) -> str:
    """Run `lines` in a fresh interpreter and return its stdout."""
    variables = {key: value for key, value in os.environ.items() if key != blas.THREADS}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=variables | environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@linux
@with_openblas
def test_mlx_multiplies_with_openblas(tmp_path: Path):
    # The dynamic linker's record of what libmlx's sgemm is bound to: timing would be a guess.
    sentence = output_of(PREPARE, MULTIPLY, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "bindings"))
    record = "".join(path.read_text(errors="replace") for path in tmp_path.iterdir())
    bindings = [
        line for line in record.splitlines() if "`cblas_sgemm'" in line and "libmlx.so" in line.split(" to ")[0]
    ]
    assert bindings
    assert all(blas.LIBRARY in line.split(" to ")[1] for line in bindings)
    assert sentence.startswith("BLAS is OpenBLAS ")


@linux
@with_openblas
def test_openblas_has_one_thread_unless_the_environment_says_otherwise():
    show = f"import os; print(os.environ[{blas.THREADS!r}])"
    assert output_of(PREPARE, show).splitlines()[0].endswith("1 thread.")
    assert output_of(PREPARE, show).splitlines()[1] == "1"
    assert output_of(PREPARE, show, OPENBLAS_NUM_THREADS="2").splitlines() == [
        output_of(PREPARE, OPENBLAS_NUM_THREADS="2"),
        "2",
    ]


@linux
def test_an_mlx_imported_before_is_admitted():
    sentence = output_of("import mlx.core", PREPARE)
    assert sentence == "BLAS is the one that came with mlx, because mlx was imported before OpenBLAS could be loaded."


@linux
def test_without_openblas_mlx_works_and_the_package_is_named():
    sentence = output_of(
        "from backend.engine.cpu import blas", "blas.LIBRARY = 'libnowhere.so.0'", "print(blas.prepare())", MULTIPLY
    )
    assert "libnowhere.so.0 is not installed" in sentence
    assert "libopenblas0-pthread" in sentence


@linux
@with_openblas
def test_its_working_memory_is_taken_before_a_limit_leaves_none():
    """A product that found no room for it tried again for ever."""
    limit = "import mmap, resource; resource.setrlimit(resource.RLIMIT_AS, (900 * 2**20,) * 2)"
    fill = (
        "import mlx.core as mx",
        "taken = []",
        "try:",
        "    while True: taken.append(mmap.mmap(-1, 2**24))",
        "except OSError: pass",
        "taken.pop()",
    )
    assert output_of(limit, PREPARE, *fill, MULTIPLY).startswith("BLAS is OpenBLAS ")


@linux
def test_a_second_call_returns_the_same_sentence():
    first, second = output_of(PREPARE, "import mlx.core", "print(blas.prepare())").splitlines()
    assert first == second


def test_other_systems_are_left_alone():
    lines = ("import sys, os", "sys.platform = 'darwin'", PREPARE, f"print({blas.THREADS!r} in os.environ)")
    assert output_of(*lines).splitlines() == ["BLAS is the one that mlx is built with on this system.", "False"]


def test_prepare_imports_no_mlx():
    assert output_of("import sys", PREPARE, "print('mlx.core' in sys.modules)").splitlines()[-1] == "False"
