"""Keep one program that nobody has read, such as one that a model wrote, to an empty folder: stricter than `confine`, and often inside it.

On Linux it can read Python and its packages, change files in its folder alone, reach no network, start no process and signal none; threads
are its own affair. On a Mac, whose sandbox cannot be entered twice, a program of a process that is confined already is kept to what that
process may do: it can read what that reads, signal it, and change files in that process's folder.
"""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from backend.rewards.confinement.confine import Confinement

_INSIDE = "GRPO_STUDIO_CONFINED"
"""Set in a process that is confined, for those that it starts."""
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache")
_TIME_ZONES = ("/usr/share/zoneinfo", "/etc/localtime")


def tell_children(confinement: Confinement) -> None:
    """Let the processes that this one starts know that it keeps them from a person's files."""
    if confinement.files:
        os.environ[_INSIDE] = "1"


def confine_program(folder: Path) -> str:
    """Confine the calling process, a fork with one thread, for good. → why it could still change a person's files; "" where it cannot."""
    if sys.platform == "linux":
        return _on_linux(folder)
    _start_nothing()
    if sys.platform == "darwin":
        from backend.rewards.confinement import seatbelt
        from backend.rewards.confinement.secrets import secret_places

        error = _error_of(lambda: seatbelt.restrict(seatbelt.profile([folder], secret_places(), False)))
        return "" if _INSIDE in os.environ else error
    return "there is no sandbox on this system"


def _on_linux(folder: Path) -> str:
    from backend.rewards.confinement.linux import landlock, privileges, seccomp

    version = landlock.abi()
    error = _error_of(privileges.give_up_privileges)
    if version:
        error = error or _error_of(lambda: landlock.restrict_to([folder], readable_by_programs(), version))
    else:
        error = error or "the kernel offers no Landlock here"
    no_filter = _error_of(lambda: seccomp.restrict(network=False, attributes=True))
    no_filter = no_filter or _error_of(lambda: seccomp.install(seccomp.refusals_of_processes()))
    if no_filter:
        _start_nothing()
    return "; ".join(reason for reason in (error, no_filter) if reason)


@cache
def readable_by_programs() -> tuple[str, ...]:
    """Python with its packages, and the system's libraries."""
    places = {sys.prefix, sys.base_prefix, sys.exec_prefix, getattr(sys, "_MEIPASS", sys.prefix)}
    places |= {path for name, path in sysconfig.get_paths().items() if "lib" in name}
    return (*sorted(places - {"/"}), *_LIBRARIES, *_TIME_ZONES)


def _start_nothing() -> None:
    """Not as sure as a filter of system calls: root is free of it, and on Linux it counts threads too."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return error.strerror or str(error)
    return ""
