"""Where Open MPI is on this machine: its launcher, and the library that MLX is to load."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import sys
from pathlib import Path

LIBRARY_VARIABLE = "MLX_MPI_LIBNAME"
"""Environment variable with the library's name or path, which MLX reads."""
_USUAL_FOLDERS = ("/opt/homebrew/bin", "/usr/local/bin", "/opt/local/bin")
"""Homebrew's and MacPorts': a Mac starts an app with a PATH that has none of them."""


def mpirun() -> str | None:
    """The path of mpirun; None where Open MPI is not installed."""
    return shutil.which("mpirun") or shutil.which("mpirun", path=os.pathsep.join(_USUAL_FOLDERS))


def mpi_variables() -> dict[str, str]:
    """What MLX needs to find the library of that mpirun.

    On a Mac by its path: macOS searches no folder of Homebrew's, and takes DYLD_LIBRARY_PATH out of the environment of every program
    that /bin/sh starts. Elsewhere by the name that the system's loader knows; a system without Open MPI's headers lacks MLX's own guess.
    """
    if os.environ.get(LIBRARY_VARIABLE):
        return {LIBRARY_VARIABLE: os.environ[LIBRARY_VARIABLE]}
    program = mpirun()
    if sys.platform == "darwin" and program is not None:
        found = sorted(Path(program).parent.parent.glob("lib/libmpi.*dylib"))
        return {LIBRARY_VARIABLE: str(found[-1])} if found else {}
    name = ctypes.util.find_library("mpi")
    return {LIBRARY_VARIABLE: name} if name else {}
