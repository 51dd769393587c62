"""Prepares a process that computes on a Linux CPU: OpenBLAS, loaded before mlx, whose own BLAS is sixteen times slower
in float32, freed memory that is kept, and a folder for compiled kernels. Imports no mlx."""

import ctypes
import os
import resource
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from backend.utils import file_lock

LIBRARY = "libopenblas.so.0"  # openBLAS with 32-bit integers, the interface that mlx is linked against

THREADS = "OPENBLAS_NUM_THREADS"

# Freed arrays up to this size are reused. By default glibc unmaps those above 32 MB, and the kernel maps every page
# of the next one again.
KEPT_BYTES = 1 << 30
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


@cache
def load_openblas() -> str:
    """Load OpenBLAS on Linux if installed and mlx is not imported yet. Returns a sentence on the BLAS in use. Sets
    OPENBLAS_NUM_THREADS to 1 if unset: small products only wait for a second thread. Has glibc keep freed arrays."""
    if sys.platform != "linux":
        return "BLAS is the one that mlx is built with on this system."
    if "mlx.core" in sys.modules:
        return "BLAS is the one that came with mlx, because mlx was imported before OpenBLAS could be loaded."
    os.environ.setdefault(THREADS, "1")
    for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(threshold, KEPT_BYTES)
    try:
        library = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        missing = f"{LIBRARY} is not installed (Debian: libopenblas0-pthread)"
        return f"BLAS is the slow one that came with mlx, because {missing}."
    _reserve_memory(library)
    return f"BLAS is {_version(library)}."


def _reserve_memory(library: ctypes.CDLL) -> None:
    """Under a limit of the address space (ulimit -v) let OpenBLAS take its memory now: later it would try for ever."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    try:
        take, give_back = library.blas_memory_alloc, library.blas_memory_free
    except AttributeError:
        return
    take.restype, give_back.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    give_back(take(0))


def _version(library: ctypes.CDLL) -> str:
    try:
        config, core, threads = (getattr(library, f"openblas_get_{x}") for x in ("config", "corename", "num_threads"))
    except AttributeError:
        return "OpenBLAS"
    config.restype = core.restype = ctypes.c_char_p
    name = " ".join(config().decode(errors="replace").split()[:2]) + f" for {core().decode(errors='replace')}"
    count = threads()
    return f"{name}, {count} {'thread' if count == 1 else 'threads'}"


CACHE = "mlx"
MOST_FOLDERS = 64  # ranks on a machine
SETTLED_S = 60.0  # a library not written to for so long is whole; compiling takes a second or two


def use_own_kernel_folder() -> Path | None:
    """Give this process a folder for what mlx compiles, with links to the whole libraries of the common folder: mlx
    loads a library that another process still writes. Returns the folder, None where none can be made."""
    # From now on Python remembers this folder and ignores changes of the environment.
    common = Path(tempfile.gettempdir()) / CACHE
    for number in range(1, MOST_FOLDERS + 1):
        own = common / f"rank-{number}"
        try:
            own.mkdir(parents=True, exist_ok=True)
            lock = file_lock.try_hold(own / "in-use.lock")
        except OSError:  # another user's, or a full disk: mlx could not write there either
            return None
        if lock is not None:  # held until this process ends
            newest = time.time() - SETTLED_S
            with suppress(OSError):  # then they are compiled again
                for library in common.glob("*/cpu/*.so"):
                    link = own / CACHE / library.relative_to(common)
                    if library.stat().st_mtime < newest and not link.exists():
                        link.parent.mkdir(parents=True, exist_ok=True)
                        link.hardlink_to(library)
            os.environ["TMPDIR"] = str(own)
            return own
    return None
