"""The first lines of both frozen programs (`start_window.py`, `start_backend.py`)."""

import multiprocessing
import os

_SET_BY_LOADER = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def prepare() -> None:
    """Make this process fit to start others.

    PyInstaller's loader points the dynamic linker at the bundle. This process has its libraries by now; a program of
    the system that inherited the variable (a compiler, a browser) would load ours in place of its own and may crash.
    And where `multiprocessing` starts this executable as if it were Python, this call runs what it asks for and does
    not return.
    """
    for name in _SET_BY_LOADER:
        before = os.environ.pop(f"{name}_ORIG", None)
        if before is not None:
            os.environ[name] = before
        else:
            os.environ.pop(name, None)
    multiprocessing.freeze_support()
