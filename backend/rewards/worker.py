"""One call of a person's code with a time limit, in a thread of its own.

Python code that runs too long is interrupted, so that its loop does not go on beside the run. Code that holds the
interpreter's lock (a C extension, a runaway regular expression) cannot be: that takes a process, and this is none.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

_GRACE_S = 1.0
_NUDGE_S = 0.05


class TimeUp(Exception):
    """The call had not returned in time."""


class CallFailed(Exception):
    """The call raised; `__cause__` is what it raised, SystemExit and its like included."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.__cause__ = cause


class _Interrupted(BaseException):
    """Raised inside a call whose time is up; no Exception, so that `except Exception` lets it pass."""


class _Worker(threading.Thread):
    def __init__(self, seconds: float, work: Callable[[], Any], read: Callable[[Any], Any]) -> None:
        # A daemon: where even interrupting fails, it must not keep the process from ending.
        super().__init__(name="reward function", daemon=True)
        self.seconds = seconds
        self.work = work
        self.read = read
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            try:
                returned = self.work()
                if inspect.isawaitable(returned):
                    returned = asyncio.run(_awaited(returned, self.seconds))
                self.value = self.read(returned)
            except BaseException as error:
                self.error = error
        except _Interrupted:
            pass  # interrupted once more while it was putting the first one away


async def _awaited(awaitable: Awaitable[Any], seconds: float) -> Any:
    """The coroutine's own time limit: a thread that waits for its event loop runs no Python to be interrupted in."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise _Interrupted from None
        raise


def call_within(seconds: float, work: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
    """`read(work())`, what `work` returns being awaited first if it is awaitable; raises TimeUp or CallFailed.

    `read` runs in the same thread and time: a generator runs only when it is read, and mlx evaluates a lazy array only
    in the thread that made it.
    """
    worker = _Worker(seconds, work, read)
    worker.start()
    worker.join(seconds)
    if worker.is_alive():
        _interrupt(worker)
        raise TimeUp
    if isinstance(worker.error, _Interrupted):
        raise TimeUp
    if worker.error is not None:
        raise CallFailed(worker.error)
    return worker.value


def _interrupt(worker: _Worker) -> None:
    """Raise in the thread until it ends; a bare `except:` in a loop swallows the first. Give up after a second."""
    give_up = time.monotonic() + _GRACE_S
    while worker.is_alive() and time.monotonic() < give_up:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(_Interrupted))
        worker.join(_NUDGE_S)
