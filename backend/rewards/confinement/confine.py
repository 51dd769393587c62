"""Confine the calling process, for good, before it runs code that we do not trust.

What is promised: no change to any file outside its folders; no secrets read; no network, unless it is allowed; no hold on other processes
(signals, their memory, their environment). Which of it holds depends on the system; `Confinement` says so, and code that is
not confined runs all the same: the caller tells the user.

What is not promised: that a disk does not fill up, that no processor time is wasted, that other files are not read, that what other
programs of the user keep in /dev/shm stays as it is (`multiprocessing` needs it). On Linux the price of the first promise
is that permissions and times of its own files cannot be changed either.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backend.rewards.confinement.secrets import secret_places


@dataclass(frozen=True, slots=True)
class Confinement:
    """By which mechanism each promise holds, such as "Landlock (ABI 7)"; "" where it does not.

    `files`: only its own folders can be changed. `secrets`: keys and tokens in their usual places cannot be read. `network`:
    nothing can be reached; "" too where the caller allowed it. `processes`: others cannot be signalled, debugged or read. `network_allowed` and
    `reason`, why something does not hold, are for `sentences`.
    """

    files: str = ""
    secrets: str = ""
    network: str = ""
    processes: str = ""
    network_allowed: bool = False
    reason: str = ""

    def sentences(self, who: str = "A reward function") -> list[str]:
        """What people should know: one sentence for each promise that does not hold here; none where all do."""
        return [f"{who} {what}: {self.reason}." for what in self._open_ways()]

    def _open_ways(self) -> Iterator[str]:
        if not self.files:
            yield "can change every file that you can"
        if not self.secrets:
            yield "can read your keys and tokens"
        if not self.network and not self.network_allowed:
            yield "can use the network although reward_network is off"
        if not self.processes:
            yield "can signal your other programs"


def confine(writable: Sequence[Path], network: bool) -> Confinement:
    """Let this process, and all that come from it, change files in `writable` only; the network is reachable with `network`.

    Called once, in a fresh child with one thread and before any user code is imported; nothing undoes it. It never fails:
    what the system does not offer is "" in the result. Raises RuntimeError where there is more than one thread, because the
    others would stay free.
    """
    if _thread_count() > 1:
        raise RuntimeError("confine() was called in a process with several threads")
    if sys.platform == "linux":
        return _confine_linux(writable, network)
    if sys.platform == "darwin":
        return _confine_mac(writable, network)
    return Confinement(network_allowed=network, reason=f"there is no sandbox on {platform.system()}")


def _confine_linux(writable: Sequence[Path], network: bool) -> Confinement:
    from backend.rewards.confinement.linux import landlock, privileges, seccomp

    with suppress(OSError, ValueError):
        privileges.limit_resources()
    privileges_error = _error_of(privileges.give_up_privileges)
    version = landlock.abi()
    signals = False

    def restrict_files() -> None:
        nonlocal signals
        signals = landlock.restrict(writable, secret_places(), version)

    landlock_error = privileges_error or (_error_of(restrict_files) if version else _no_landlock())
    filter_error = privileges_error or _error_of(lambda: seccomp.restrict(network, attributes=True))
    if not filter_error:
        seccomp.let_copies_go_on_without_modes()
    files = f"Landlock (ABI {version})" if not landlock_error else ""
    call_filter = "a filter of system calls" if not filter_error else ""
    if not landlock_error and version < 3:
        landlock_error = f"Landlock of {platform.release()} cannot refuse truncate()"
    if not landlock_error and not signals:
        landlock_error = f"Landlock of {platform.release()} does not know signals"
    return Confinement(
        files=f"{files} and {call_filter}" if files and call_filter and version >= 3 else "",
        secrets=files,
        network="" if network else call_filter,
        processes=f"{files} and {call_filter}" if files and signals and call_filter else "",
        network_allowed=network,
        reason="; ".join(reason for reason in (landlock_error, filter_error) if reason),
    )


def _no_landlock() -> str:
    return f"the kernel {platform.release()} offers no Landlock here"


def _confine_mac(writable: Sequence[Path], network: bool) -> Confinement:
    from backend.rewards.confinement import seatbelt

    with suppress(OSError, ValueError):
        _no_core_files()
    error = _error_of(lambda: seatbelt.restrict(seatbelt.profile(writable, secret_places(), network)))
    held = "" if error else "seatbelt"
    return Confinement(held, held, "" if network else held, held, network, error)


def _no_core_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _error_of(action: Callable[[], None]) -> str:
    try:
        action()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # a Mac: Python's own threads
        import threading

        return threading.active_count()
