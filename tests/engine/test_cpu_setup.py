"""OpenBLAS in place of mlx's BLAS, and a kernel folder for each rank. Each case runs in its own process."""

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from backend.engine import cpu_setup, device
from backend.engine.device import CACHE_SHARE, on_cpu, release_cached_buffers
from backend.utils.errors import UserError
from backend.utils.machine import TREAT_CPU_AS
from tests.support import small_run

ROOT = Path(cpu_setup.__file__).parents[2]
PREPARE = "from backend.engine import cpu_setup; print(cpu_setup.load_openblas())"
MULTIPLY = "import mlx.core as mx; a = mx.ones((64, 64)); mx.eval(a @ a)"


def openblas_is_installed() -> bool:
    try:
        ctypes.CDLL(cpu_setup.LIBRARY)
    except OSError:
        return False
    return True


linux = pytest.mark.skipif(sys.platform != "linux", reason="BLAS is chosen on Linux only")
with_openblas = pytest.mark.skipif(not openblas_is_installed(), reason=f"{cpu_setup.LIBRARY} is not installed")


def output_of(*lines: str, **environment: str) -> str:
    """Run `lines` in a fresh interpreter and return its stdout."""
    variables = {key: value for key, value in os.environ.items() if key != cpu_setup.THREADS}
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
    assert all(cpu_setup.LIBRARY in line.split(" to ")[1] for line in bindings)
    assert sentence.startswith("BLAS is OpenBLAS ")


@linux
def test_without_openblas_mlx_works_and_the_package_is_named():
    without = "from backend.engine import cpu_setup; cpu_setup.LIBRARY = 'libnowhere.so.0'"
    sentence = output_of(without, "print(cpu_setup.load_openblas())", MULTIPLY)
    assert "libnowhere.so.0 is not installed" in sentence
    assert "libopenblas0-pthread" in sentence


RANK = """
import sys
from backend.engine import cpu_setup
print(cpu_setup.use_own_kernel_folder(), flush=True)
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
    os.utime(library, (0, time.time() - 2 * cpu_setup.SETTLED_S))
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


PREPARE_AND_COMPUTE = """
import mlx.core as mx
early = mx.compile(lambda x: mx.sin(x) * 2 + x)
from backend.engine import cpu
print(cpu.check_compiler())
print(early(mx.zeros((3, 5))).sum().item())
"""


@pytest.mark.skipif(not on_cpu(), reason="a GPU needs no compiler of the system")
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


@pytest.fixture(autouse=True)
def _own_device_again() -> Iterator[None]:
    yield
    mx.set_default_device(device.OWN)


def test_a_gpu_that_is_not_there_is_refused_by_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "is_available", lambda kind: kind != mx.gpu)
    with pytest.raises(UserError, match="MLX has no GPU"):
        device.use("gpu")
    faults = small_run.check(small_run.settings_for(tmp_path, device="gpu"))
    assert [fault.setting for fault in faults] == ["device"]
    assert not small_run.check(small_run.settings_for(tmp_path, device="cpu"))


def _cached() -> int:
    """Bytes in MLX's cache after an array of 1 MB is freed."""
    mx.clear_cache()
    mx.eval(mx.zeros(250_000))
    return mx.get_cache_memory()


@pytest.mark.parametrize(("limit", "kept"), [(1 << 40, True), (1 << 20, False)])
def test_a_gpu_keeps_buffers_until_its_limit_is_near(limit: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")
    monkeypatch.setattr(mx, "get_memory_limit", lambda: limit)
    cached = _cached()
    assert cached >= 1_000_000 and (mx.get_active_memory() + cached < CACHE_SHARE * limit) == kept
    release_cached_buffers()
    assert mx.get_cache_memory() == (cached if kept else 0)
