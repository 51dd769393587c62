"""Call a user's code with a time limit, in a thread of its own: one call, or several `async def` calls concurrently.

Python code that runs too long is interrupted: CPython raises an exception in another thread on request
(PyThreadState_SetAsyncExc), so an endless loop does not continue beside the run. A thread cannot be interrupted in a call
into C that holds the GIL, such as a regular expression with catastrophic backtracking, `(a+)+$`, or a C extension in a
loop. While it lasts no other thread runs either, not even the one that waits for the timeout; the sandbox
(`backend.rewards.sandbox`), a process, is for that. Code that is blocked in C without the GIL (sleep, a socket) is left
behind in its daemon thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

_INTERRUPT_FOR_S = 1.0
"""How long a thread is interrupted repeatedly before it is left behind."""
_INTERRUPT_EVERY_S = 0.05
_LOOP_GRACE_S = 0.2
"""How long an event loop may take to cancel overdue calls by itself, before its thread is interrupted."""


class CallTimeout(Exception):
    """The call had not returned in time; of several, `index` is the first that had not."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index


class CallFailed(Exception):
    """The call raised `__cause__`, which may be a SystemExit too; of several calls, `index` did."""

    def __init__(self, cause: BaseException, index: int = 0) -> None:
        super().__init__(str(cause))
        self.__cause__ = cause
        self.index = index


class _Interrupted(BaseException):
    """Raised inside a call whose time is up. Not an Exception: a user's `except Exception` must not catch it."""


class _CallThread(threading.Thread):
    def __init__(self, work: Callable[[], Any]) -> None:
        # A daemon thread: one that cannot be interrupted must not keep the process from ending.
        super().__init__(name="reward function", daemon=True)
        self.work = work
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            try:
                self.value = self.work()
            except BaseException as error:
                self.error = error
        except _Interrupted:
            pass  # interrupted a second time while the inner handler stored the first

    def run_for(self, seconds: float) -> bool:
        """Start, wait, and interrupt what still runs then. Returns whether it ended by itself."""
        self.start()
        self.join(seconds)
        if not self.is_alive():
            return True
        _interrupt(self)
        return False


def call_with_timeout(seconds: float, work: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
    """`read(work())`, with an awaitable that `work` returns awaited first. Raises CallTimeout or CallFailed.

    `read` runs in the same thread within the same time: a generator runs only when it is read, and mlx evaluates a lazy
    array only in the thread that made it.
    """

    def call_and_read() -> Any:
        returned = work()
        return read(asyncio.run(_awaited(returned, seconds)) if inspect.isawaitable(returned) else returned)

    thread = _CallThread(call_and_read)
    if not thread.run_for(seconds) or isinstance(thread.error, _Interrupted):
        raise CallTimeout
    if thread.error is not None:
        raise CallFailed(thread.error)
    return thread.value


async def _awaited(awaitable: Awaitable[Any], seconds: float) -> Any:
    """Await with asyncio's own timeout: a thread that is in its event loop's `select` cannot be interrupted."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise _Interrupted from None
        raise  # the user's own TimeoutError


AsyncCall = tuple[Callable[[], Awaitable[Any]], Callable[[Any], Any]]
"""A call that returns an awaitable, and a function that reads the value it gives."""


def gather_with_timeout(seconds: float, calls: Sequence[AsyncCall]) -> list[tuple[Any, float]]:
    """(value read, seconds taken) of each call, all awaited concurrently in one event loop.

    Each has `seconds` of its own. The first to fail or run out of time ends them all, as CallTimeout or CallFailed with
    its index; a call that blocks the loop is interrupted, and the index is its own. The loop is the same from step
    to step, because what a user's code keeps open between steps, such as connections to a judge model, belongs to the loop
    in which it was opened.
    """
    # Each call has asyncio's own timeout, so this wait is exceeded only where a call blocks the loop or ignores its cancellation.
    loop, gathering = _LoopThread.running(), _Gathering(seconds, calls)
    future = asyncio.run_coroutine_threadsafe(gathering.run(), loop.loop)
    if not gathering.is_ended.wait(seconds + _LOOP_GRACE_S):
        _interrupt(loop, until=gathering.is_ended)
        loop.abandon()
    wait([future], _LOOP_GRACE_S)  # the other calls are cancelled in this time, or left behind
    if gathering.failure:
        index, error = gathering.failure
        raise CallTimeout(index) if isinstance(error, _Interrupted) else CallFailed(error, index)
    if len(gathering.results) < len(calls):
        raise CallTimeout(next(index for index in range(len(calls)) if index not in gathering.results))
    return [gathering.results[index] for index in range(len(calls))]


class _LoopThread(threading.Thread):
    """A thread with an event loop that idles between steps; replaced by another after it had to be interrupted."""

    _lock = threading.Lock()
    _current: _LoopThread | None = None

    def __init__(self) -> None:
        super().__init__(name="event loop of reward functions", daemon=True)
        self.loop = asyncio.new_event_loop()

    @classmethod
    def running(cls) -> _LoopThread:
        with cls._lock:
            if cls._current is None or not cls._current.is_alive():
                cls._current = cls()
                cls._current.start()
            return cls._current

    def run(self) -> None:
        with suppress(_Interrupted, SystemExit):
            self.loop.run_forever()

    def abandon(self) -> None:
        """Make the next step start another loop: an interrupt may still be on its way to this one."""
        with _LoopThread._lock:
            _LoopThread._current = None
        self.loop.call_soon_threadsafe(self.loop.stop)


class _Gathering:
    """Several calls in one loop: the results so far by index, and the first failure."""

    def __init__(self, seconds: float, calls: Sequence[AsyncCall]) -> None:
        self.seconds = seconds
        self.calls = calls
        self.results: dict[int, tuple[Any, float]] = {}
        self.failure: tuple[int, BaseException] | None = None
        self.is_ended = threading.Event()

    async def run(self) -> None:
        with suppress(ExceptionGroup):  # the reason is in `failure`
            async with asyncio.TaskGroup() as tasks:
                for index, (work, read) in enumerate(self.calls):
                    tasks.create_task(self._run_one(index, work, read))
        self.is_ended.set()

    async def _run_one(self, index: int, work: Callable[[], Awaitable[Any]], read: Callable[[Any], Any]) -> None:
        start = time.perf_counter()
        try:
            value = read(await _awaited(work(), self.seconds))
        except GeneratorExit:
            raise  # the loop was abandoned, and its pending coroutines are garbage-collected
        except BaseException as error:
            self.failure = self.failure or (index, error)
            self.is_ended.set()
            # Re-raised as an Exception, so that the TaskGroup cancels the other calls; SystemExit would end the loop.
            raise RuntimeError("a call failed") from None
        self.results[index] = value, time.perf_counter() - start


def _interrupt(thread: threading.Thread, until: threading.Event | None = None) -> None:
    """Raise _Interrupted in `thread` until it ends or `until` is set; a bare `except:` in a loop swallows the first."""
    # The exception is only marked as pending; the thread raises it at its next bytecode. While it is in C that has released
    # the GIL nothing happens, hence the deadline. An id whose thread has ended is ignored.
    deadline = time.monotonic() + _INTERRUPT_FOR_S
    while thread.is_alive() and time.monotonic() < deadline and not (until and until.is_set()):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Interrupted))
        until.wait(_INTERRUPT_EVERY_S) if until else thread.join(_INTERRUPT_EVERY_S)
