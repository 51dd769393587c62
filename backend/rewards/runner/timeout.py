"""Call a user's code with a time limit, in a thread of its own: one call, or several `async def` calls concurrently.

Python code that runs too long is interrupted: CPython raises an exception in another thread on request
(PyThreadState_SetAsyncExc), so an endless loop does not continue beside the run. A thread cannot be interrupted in a call
into C that holds the GIL, such as a regular expression with catastrophic backtracking, `(a+)+$`, or a C extension in a
loop. While it lasts no other thread runs either, not even the one that waits for the timeout; the scoring process
(`backend.rewards.sandbox`) is for that. Code that is blocked in C without the GIL (sleep, a socket) is left
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
from typing import Any, Protocol

from backend.rewards.runner.step_calls import AsyncCall, CallFailed, CallTimeout, Poll, wait_on

# Awaiting a user's `async def` functions with asyncio's own time limits: one, or several in one event loop.


class Ended(Protocol):
    """An event of threads or of asyncio."""

    def set(self) -> None: ...


class Interrupted(BaseException):
    """Raised inside a call whose time is up. Not an Exception: a user's `except Exception` must not catch it."""


async def awaited(awaitable: Awaitable[Any], seconds: float) -> Any:
    """Await with asyncio's own timeout: a thread that is in its event loop's `select` cannot be interrupted."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise Interrupted from None
        raise  # the user's own TimeoutError


class Gathering:
    """Several calls in one loop: the results so far by index, and the first failure. `is_ended` is set once there is nothing to wait for."""

    def __init__(self, seconds: float, calls: Sequence[AsyncCall], is_ended: Ended) -> None:
        self.seconds = seconds
        self.calls = calls
        self.results: dict[int, tuple[Any, float]] = {}
        self.failure: tuple[int, BaseException] | None = None
        self.is_ended = is_ended

    async def run(self) -> None:
        with suppress(ExceptionGroup):  # the reason is in `failure`
            async with asyncio.TaskGroup() as tasks:
                for index, (work, read) in enumerate(self.calls):
                    tasks.create_task(self._run_one(index, work, read))
        self.is_ended.set()

    async def _run_one(self, index: int, work: Callable[[], Awaitable[Any]], read: Callable[[Any], Any]) -> None:
        start = time.perf_counter()
        try:
            value = read(await awaited(work(), self.seconds))
        except GeneratorExit:
            raise  # the loop was abandoned, and its pending coroutines are garbage-collected
        except BaseException as error:
            self.failure = self.failure or (index, error)
            self.is_ended.set()
            # Re-raised as an Exception, so that the TaskGroup cancels the other calls; SystemExit would end the loop.
            raise RuntimeError("a call failed") from None
        self.results[index] = value, time.perf_counter() - start

    def outcome(self) -> list[tuple[Any, float]]:
        """(value read, seconds) of each call. Raises CallTimeout or CallFailed with the index of the call that ended the others."""
        if self.failure:
            index, error = self.failure
            raise CallTimeout(index) if isinstance(error, Interrupted) else CallFailed(error, index)
        if len(self.results) < len(self.calls):
            raise CallTimeout(next(index for index in range(len(self.calls)) if index not in self.results))
        return [self.results[index] for index in range(len(self.calls))]


# ── timeout ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_POLL_S = 0.05
"""How often `poll` is called while a call runs."""
_INTERRUPT_FOR_S = 1.0
"""How long a thread is interrupted repeatedly before it is left behind."""
_INTERRUPT_EVERY_S = 0.05
_LOOP_GRACE_S = 0.2
"""How long an event loop may take to cancel overdue calls by itself, before its thread is interrupted."""


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
        except Interrupted:
            pass  # interrupted a second time while the inner handler stored the first

    def run_for(self, seconds: float, poll: Poll) -> bool:
        """Start, wait, and interrupt what still runs then, or once `poll` raises. Returns whether it ended by itself."""
        self.start()
        try:
            if _waited(lambda wait_s: not (self.join(wait_s) or self.is_alive()), seconds, poll):
                return True
        finally:
            if self.is_alive():
                _interrupt(self)
        return False


def call_with_timeout(seconds: float, work: Callable[[], Any], read: Callable[[Any], Any], poll: Poll = wait_on) -> Any:
    """`read(work())`, with an awaitable that `work` returns awaited first. Raises CallTimeout, CallFailed, and what `poll` raises.

    `read` runs in the same thread within the same time: a generator runs only when it is read, and mlx evaluates a lazy
    array only in the thread that made it.
    """

    def call_and_read() -> Any:
        returned = work()
        return read(asyncio.run(awaited(returned, seconds)) if inspect.isawaitable(returned) else returned)

    thread = _CallThread(call_and_read)
    if not thread.run_for(seconds, poll) or isinstance(thread.error, Interrupted):
        raise CallTimeout
    if thread.error is not None:
        raise CallFailed(thread.error)
    return thread.value


def gather_with_timeout(seconds: float, calls: Sequence[AsyncCall], poll: Poll = wait_on) -> list[tuple[Any, float]]:
    """(value read, seconds taken) of each call, all awaited concurrently in one event loop.

    Each has `seconds` of its own. The first to fail or run out of time ends them all, as CallTimeout or CallFailed with
    its index; a call that blocks the loop is interrupted, and the index is its own. The loop is the same from step
    to step, because what a user's code keeps open between steps, such as connections to a judge model, belongs to the loop
    in which it was opened.
    """
    # Each call has asyncio's own timeout, so this wait is exceeded only where a call blocks the loop or ignores its cancellation.
    is_ended = threading.Event()
    loop, gathering = _LoopThread.running(), Gathering(seconds, calls, is_ended)
    future = asyncio.run_coroutine_threadsafe(gathering.run(), loop.loop)
    try:
        _waited(is_ended.wait, seconds + _LOOP_GRACE_S, poll)
    finally:
        if not is_ended.is_set():
            _interrupt(loop, until=is_ended)
            loop.abandon()
    wait([future], _LOOP_GRACE_S)  # the other calls are cancelled in this time, or left behind
    return gathering.outcome()


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
        with suppress(Interrupted, SystemExit):
            self.loop.run_forever()

    def abandon(self) -> None:
        """Make the next step start another loop: an interrupt may still be on its way to this one."""
        with _LoopThread._lock:
            _LoopThread._current = None
        self.loop.call_soon_threadsafe(self.loop.stop)


def _waited(ends_within: Callable[[float], bool], seconds: float, poll: Poll) -> bool:
    """Whether it ends within `seconds`. Raises what `poll` raises."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if ends_within(min(left, _POLL_S)):
            return True
        poll()
    return False


def _interrupt(thread: threading.Thread, until: threading.Event | None = None) -> None:
    """Raise Interrupted in `thread` until it ends or `until` is set; a bare `except:` in a loop swallows the first."""
    # The exception is only marked as pending; the thread raises it at its next bytecode. While it is in C that has released
    # the GIL nothing happens, hence the deadline. An id whose thread has ended is ignored.
    deadline = time.monotonic() + _INTERRUPT_FOR_S
    while thread.is_alive() and time.monotonic() < deadline and not (until and until.is_set()):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupted))
        until.wait(_INTERRUPT_EVERY_S) if until else thread.join(_INTERRUPT_EVERY_S)


class ThreadCaller:
    """Calls in this process, each in a thread that is interrupted when its time is up (`reward_isolation: thread`), or once `poll` raises."""

    def __init__(self, poll: Poll = wait_on) -> None:
        self._poll = poll

    def call(self, index: int, seconds: float, work: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        return call_with_timeout(seconds, work, read, self._poll)

    def gather(self, indices: Sequence[int], seconds: float, calls: Sequence[AsyncCall]) -> list[tuple[Any, float]]:
        return gather_with_timeout(seconds, calls, self._poll)
