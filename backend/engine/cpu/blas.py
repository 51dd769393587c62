"""Loads OpenBLAS in front of the BLAS that mlx's Linux wheel bundles.

The Linux wheel of mlx brings netlib's reference BLAS, some sixteen times slower in float32 than OpenBLAS. The dynamic linker
looks symbols up in the order in which libraries became global, so loading OpenBLAS with RTLD_GLOBAL before mlx is enough: no
LD_PRELOAD, no rebuild. `prepare` must therefore run before the first import of mlx. It installs nothing, imports no mlx and
does nothing on other platforms; without OpenBLAS everything works, only slower. 16-bit and quantised products are not helped:
mlx does not send those to a BLAS.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from functools import cache

LIBRARY = "libopenblas.so.0"
"""The soname of OpenBLAS with 32-bit integers, the interface that mlx is linked against."""

THREADS = "OPENBLAS_NUM_THREADS"


@cache
def prepare() -> str:
    """Load OpenBLAS if this is Linux, it is installed and mlx is not imported yet; return one sentence on the BLAS in use.

    Later calls change nothing and return the same sentence. Sets OPENBLAS_NUM_THREADS to 1 for this process and its
    children unless it is set already: products this small only wait for a second thread.
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
    _reserve_memory(library)
    return f"BLAS is {_version(library)}."


def _reserve_memory(library: ctypes.CDLL) -> None:
    """Under a limit of the address space (ulimit -v), let OpenBLAS take its working memory while there is room. It keeps it for all later products,
    from any thread; a product that finds no room for it tries again for ever."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    try:
        take, give_back = library.blas_memory_alloc, library.blas_memory_free
    except AttributeError:
        return
    take.restype, give_back.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    give_back(take(0))


def _version(library: ctypes.CDLL) -> str:
    """Name, version and threads of a loaded OpenBLAS; its name alone in builds without these functions."""
    try:
        config, threads = library.openblas_get_config, library.openblas_get_num_threads
    except AttributeError:
        return "OpenBLAS"
    config.restype = ctypes.c_char_p
    name = " ".join(config().decode(errors="replace").split()[:2])
    count = threads()
    return f"{name}, {count} {'thread' if count == 1 else 'threads'}"
