"""A process that outlives the confined one by an instant, to end all that it started: daemons and other sessions too.

`guard()` forks; the caller goes on as the worker, and the guard ends everything when the worker ends, and when the other end of the
worker's requests, by default its stdin, is closed: the parent asks for it so, or has died, of SIGKILL too.

On Linux the guard is the worker's parent. It takes the place of the process that was started, ends with the worker's exit code or signal,
and END_SIGNAL tells it to end everything. It is the "subreaper" of its descendants: a process that loses its parent becomes the guard's
child, however it tried to get away, so none is missed (prctl(2), PR_SET_CHILD_SUBREAPER). Should the guard itself get SIGKILL, the kernel
ends the worker but not what that had started.

On a Mac the guard is the worker's child, for Apple's frameworks do not work in a process that was forked and has not called exec.
There are no subreapers: the guard ends the worker's process group, and what has left that is missed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

END_SIGNAL = signal.SIGTERM if sys.platform == "linux" else signal.SIGKILL
"""What a parent sends to the process that it started, to end it and all that came from it."""
GRACE_S = 1.0
"""How long the worker may take to end by itself once its requests are closed."""
ENDING_S = 5.0
"""How long the guard goes on killing what a worker's descendants start anew."""
BESIDE_POLL_S = 0.25
"""How often a guard that is the worker's child looks whether it lives."""


def guard(watched: int = 0) -> None:
    """Fork, and return in the worker. Called first in a child that leads its process group and has one thread, before its pipes are
    copied. `watched`: the pipe whose other end the parent holds as long as it wants the worker."""
    if sys.platform == "linux":
        _guard_above(watched)
    else:
        guard_beside(watched)


def _guard_above(watched: int) -> None:
    from backend.rewards.confinement.linux.libc import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

    parent = os.getpid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker:
        _watch(worker, watched)
    # A subreaper is not inherited; the signal comes when the guard's only thread ends.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)  # a signal to its own group must not reach the guard


def guard_beside(watched: int = 0) -> None:
    """The guard of a system without subreapers: a child of the worker, in a group of its own."""
    worker = os.getpid()
    if os.fork():
        return
    os.setpgid(0, 0)
    _close_all_but(watched)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    # Only the hang-up: the requests are the worker's to read. It is always reported, says POSIX, but macOS watches a descriptor for
    # which nothing is asked for not at all.
    poll.register(watched, select.POLLHUP)
    deadline: float | None = None
    while os.getppid() == worker and (deadline is None or time.monotonic() < deadline):
        if deadline is not None:
            time.sleep(BESIDE_POLL_S)
        elif poll.poll(1000 * BESIDE_POLL_S):
            deadline = time.monotonic() + GRACE_S
    with suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    os._exit(0)


def _watch(worker: int, watched: int) -> NoReturn:
    """The life of a guard that is the worker's parent."""
    _close_all_but(watched)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # waking is enough
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    status = _wait(worker, watched, woken)
    if status is None:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        _, status = os.waitpid(worker, 0)
    _end_all(worker)
    _end_as(status)


def _close_all_but(watched: int) -> None:
    """The other pipes must end with the worker, not with the guard."""
    if watched:  # closerange(0, 0) closes all there are
        os.closerange(0, watched)
    os.closerange(watched + 1, 1 << 16)


def _wait(worker: int, watched: int, woken: int) -> int | None:
    """The worker's wait status; None where it has to be ended."""
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(watched, 0)  # only the hang-up: the requests are the worker's to read
    deadline: float | None = None
    while deadline is None or time.monotonic() < deadline:
        events = dict(poll.poll(None if deadline is None else 1000 * max(deadline - time.monotonic(), 0)))
        if woken in events and signal.SIGTERM in os.read(woken, 64):
            return None
        if watched in events:
            poll.unregister(watched)
            deadline = time.monotonic() + GRACE_S
        # Orphans end as children of ours too, and are only collected.
        while (ended := _ended_child()) is not None:
            if ended[0] == worker:
                return ended[1]
    return None


def _ended_child() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _end_all(worker: int) -> None:
    """Kill until there is nobody left. The orphans of what is killed become our children, and are next."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    deadline = time.monotonic() + ENDING_S
    while time.monotonic() < deadline:
        for pid in _children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Our children."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as children:
        return [int(pid) for pid in children.read().split()]
    return _children_by_parent()


def _children_by_parent() -> list[int]:
    """The same from every process's `stat`, for kernels built without the list."""
    children = []
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # pid (name) state parent …; the name may hold anything
                if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    children.append(int(name))
    return children


def _end_as(status: int) -> NoReturn:
    """End with the worker's exit code, or of its signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(number, signal.SIG_DFL)
        _no_core_file()
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _no_core_file() -> None:
    import resource

    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
