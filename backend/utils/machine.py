"""This machine, without mlx: GPU or CPU, the chip, and the memory that a run may use."""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

TREAT_CPU_AS = "GRPO_STUDIO_TREAT_CPU_AS"  # makes a CPU take the choices of a GPU (`backend.engine.device`)
PROCESS_BYTES = 600_000_000  # memory of Python and the libraries beside MLX's arrays, data and tokenizer included
USABLE_SHARE = 0.75  # share of the memory that a run may use; the rest is for the system and other programs
GB_36 = 36 << 30
READ_S = 2.0


def treats_cpu_as_gpu() -> bool:
    return os.environ.get(TREAT_CPU_AS) == "gpu"


def has_gpu() -> bool:
    """True if a run makes the choices of a GPU: on a Mac, or where the environment says so."""
    return sys.platform == "darwin" or treats_cpu_as_gpu()


@cache
def chip() -> str:
    """A Mac's chip as Metal names it, e.g. "Apple M3 Max"; "" elsewhere."""
    return sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode(errors="replace") if sys.platform == "darwin" else ""


@cache
def processor() -> str:
    """The processor's own name, else its kind."""
    if sys.platform == "darwin":
        return chip() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def sysctl(name: str) -> bytes:
    """Bytes of a value of macOS's kernel (man 3 sysctlbyname); b"" where there is no such value or function."""
    read = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if read is None:
        return b""
    size = ctypes.c_size_t(256)
    value = ctypes.create_string_buffer(size.value)
    failed = read(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else value.raw[: size.value]


def machine_bytes(held: int = 0, working_set: int | None = None) -> int:
    """Bytes that a run may use for its arrays. On a Mac a share of all memory, at most Metal's `working_set` where a
    process with mlx knows it; elsewhere of what is available and what the run holds already (`held`)."""
    if sys.platform != "darwin":  # what is available leaves out what this process holds already, and may keep
        return usable_bytes(psutil.virtual_memory().available + held)
    physical = psutil.virtual_memory().total
    share = min(USABLE_SHARE * physical, working_set or working_set_of(physical))
    return max(0, int(share) - PROCESS_BYTES)


def usable_bytes(available: int) -> int:
    """Bytes for a run of those that are available on Linux."""
    return max(0, int(USABLE_SHARE * available) - PROCESS_BYTES)


def working_set_of(physical: int) -> int:
    """About Metal's `recommendedMaxWorkingSetSize` on a Mac with that many bytes: two thirds up to 36 GB, three
    quarters above; or the user's `sysctl iogpu.wired_limit_mb`."""
    if megabytes := int.from_bytes(sysctl("iogpu.wired_limit_mb"), sys.byteorder):
        return megabytes << 20
    return physical * 2 // 3 if physical <= GB_36 else physical * 3 // 4


def printed_by(command: Sequence[str]) -> str:
    """What a command prints; "" where it fails."""
    try:
        # Without close_fds Python uses posix_spawn, which copies nothing of a process with gigabytes of memory.
        return subprocess.run(command, capture_output=True, text=True, timeout=READ_S, close_fds=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
