"""Which BLAS multiplies the matrices on the CPU, and the one place where that is chosen.

The Linux wheel of mlx brings netlib's reference BLAS, some sixteen times slower in float32 than OpenBLAS. Symbols are
looked up in the order in which libraries became global, so loading OpenBLAS globally ahead of mlx is enough: no preload,
no rebuild. `prepare` must therefore come before the first import of mlx. It installs nothing, imports no mlx and touches
no other platform; without OpenBLAS everything works, only slower.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

LIBRARY = "libopenblas.so.0"
"""The name under which distributions ship OpenBLAS with 32-bit integers, the kind mlx is linked against."""

THREADS = "OPENBLAS_NUM_THREADS"


@cache
def prepare() -> str:
    """Put OpenBLAS ahead of the BLAS inside mlx where that can be done, and say in one sentence which BLAS is in use.

    Linux only. Later calls change nothing and give the same sentence. Sets OPENBLAS_NUM_THREADS to 1 for this process
    and its children unless it is set already: products this small only wait for a second thread.
    """
    if sys.platform != "linux":
        return "BLAS is the one that mlx is built with on this system."
    if "mlx.core" in sys.modules:
        return "BLAS is the one that came with mlx, because mlx was imported before OpenBLAS could be loaded."
    os.environ.setdefault(THREADS, "1")
    try:
        library = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return f"BLAS is the slow one that came with mlx, because {LIBRARY} is not installed (Debian: libopenblas0-pthread)."
    return f"BLAS is {_version(library)}."


def _version(library: ctypes.CDLL) -> str:
    """Name, version and threads of a loaded OpenBLAS; its name alone where it does not tell."""
    try:
        config, threads = library.openblas_get_config, library.openblas_get_num_threads
    except AttributeError:
        return "OpenBLAS"
    config.restype = ctypes.c_char_p
    name = " ".join(config().decode(errors="replace").split()[:2])
    count = threads()
    return f"{name}, {count} {'thread' if count == 1 else 'threads'}"
