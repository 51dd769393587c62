"""A guard process that kills everything the confined worker started.

The caller becomes the worker. The guard acts when the worker ends or its request pipe closes. Linux: it is the worker's
parent and subreaper (prctl(2), PR_SET_CHILD_SUBREAPER). macOS: a child that ends the worker's process group only, since
Apple's frameworks fail after fork.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

END_SIGNAL = signal.SIGTERM if sys.platform == "linux" else signal.SIGKILL  # kills the process and its descendants
GRACE_S = 1.0  # seconds for the worker to end after its requests close
_ENDING_S = 5.0
_BESIDE_POLL_S = 0.25


def guard(watched: int, *, scoped: bool = True) -> None:
    """Fork and return in the worker. Call first in a single-threaded group leader. `watched`: pipe that the parent
    keeps open. `scoped`: on Linux the worker may signal only its descendants."""
    if sys.platform != "linux":
        return guard_beside(watched)
    from backend.rewards.confinement.linux import PR_SET_CHILD_SUBREAPER, end_with_parent, prctl, scope_signals

    parent = os.getpid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    is_scoped = scoped and scope_signals()
    worker = os.fork()
    if worker:
        _watch(worker, watched, is_scoped)
    # A subreaper is not inherited; the signal comes when the guard's only thread ends.
    end_with_parent(parent)
    return os.setpgid(0, 0)  # a signal to its own group must not reach the guard


def guard_beside(watched: int) -> None:
    """Guard for systems without subreapers: a child in a separate group."""
    worker = os.getpid()
    if os.fork():
        return
    os.setpgid(0, 0)
    _close_all_but(watched)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    # POSIX reports the hang-up always, but macOS does not watch a descriptor for which nothing is asked.
    poll.register(watched, select.POLLHUP)
    deadline = float("inf")
    while os.getppid() == worker and time.monotonic() < deadline:
        if deadline < float("inf"):
            time.sleep(_BESIDE_POLL_S)
        elif poll.poll(1000 * _BESIDE_POLL_S):
            deadline = time.monotonic() + GRACE_S
    with suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    os._exit(0)


def _close_all_but(watched: int) -> None:
    if watched:  # closerange(0, 0) closes all there are
        os.closerange(0, watched)
    os.closerange(watched + 1, 1 << 16)


def _watch(worker: int, watched: int, is_scoped: bool) -> NoReturn:
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
    # Kill all descendants; orphans are children of this subreaper. A process that forks without end outruns a loop,
    # so first all at once: every process that this one may signal, or at least the worker's group.
    with suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL) if is_scoped else os.killpg(worker, signal.SIGKILL)
    deadline = time.monotonic() + _ENDING_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as children:
                for pid in map(int, children.read().split()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
    if os.WIFSIGNALED(status):  # end of the worker's signal, without a core file of our own
        import resource

        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _wait(worker: int, watched: int, woken: int) -> int | None:
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(watched, 0)  # only the hang-up: the worker reads the requests
    deadline: float | None = None
    while deadline is None or time.monotonic() < deadline:
        with suppress(ChildProcessError):  # first: it may have ended before that could wake us. Orphans end here too
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    return ended[1]
        events = dict(poll.poll(None if deadline is None else 1000 * max(deadline - time.monotonic(), 0)))
        if woken in events and signal.SIGTERM in os.read(woken, 64):
            return None
        if watched in events:
            poll.unregister(watched)
            deadline = time.monotonic() + GRACE_S
    return None


def main(arguments: Sequence[str] = ()) -> NoReturn:
    """Become a command that ends, with all that it started, when its stdin is closed or this program ends."""
    guard(0, scoped=False)
    _, _, theirs = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)  # see `backend_environment`
    if theirs:
        os.environ["PYTHONPATH"] = theirs
    try:
        os.execvp(arguments[0], [*arguments])
    except OSError as error:
        sys.exit(f"{arguments[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
