"""Calls of a person's code with a time limit, in a thread of their own: one, or several `async def` ones together.

Python code that runs too long is interrupted, so that its loop does not go on beside the run. Code that holds the
interpreter's lock (a C extension, a runaway regular expression) cannot be: that takes a process, and this is none.
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

_GRACE_S = 1.0
_NUDGE_S = 0.05
_HEAD_START_S = 0.2
"""How long an event loop may take to end by itself what has run out of time, before it is interrupted."""


class TimeUp(Exception):
    """The call had not returned in time; of several, `index` is the first that had not."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index


class CallFailed(Exception):
    """The call raised; `__cause__` is what it raised, SystemExit and its like included; of several, that of `index`."""

    def __init__(self, cause: BaseException, index: int = 0) -> None:
        super().__init__(str(cause))
        self.__cause__ = cause
        self.index = index


class _Interrupted(BaseException):
    """Raised inside a call whose time is up; no Exception, so that `except Exception` lets it pass."""


class _Worker(threading.Thread):
    def __init__(self, work: Callable[[], Any]) -> None:
        # A daemon: where even interrupting fails, it must not keep the process from ending.
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
            pass  # interrupted once more while it was putting the first one away

    def finish(self, seconds: float) -> bool:
        """Start, wait, and interrupt what is still running then; whether it ended by itself."""
        self.start()
        self.join(seconds)
        if not self.is_alive():
            return True
        _interrupt(self)
        return False


def call_within(seconds: float, work: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
    """`read(work())`, what `work` returns being awaited first if it is awaitable; raises TimeUp or CallFailed.

    `read` runs in the same thread and time: a generator runs only when it is read, and mlx evaluates a lazy array only
    in the thread that made it.
    """

    def both() -> Any:
        returned = work()
        return read(asyncio.run(_awaited(returned, seconds)) if inspect.isawaitable(returned) else returned)

    worker = _Worker(both)
    if not worker.finish(seconds) or isinstance(worker.error, _Interrupted):
        raise TimeUp
    if worker.error is not None:
        raise CallFailed(worker.error)
    return worker.value


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


Work = tuple[Callable[[], Awaitable[Any]], Callable[[Any], Any]]
"""A call that returns something awaitable, and what reads its value."""


def gather_within(seconds: float, works: Sequence[Work]) -> list[tuple[Any, float]]:
    """(value read, seconds it took) of each call, all of them awaited together in one event loop.

    Each has `seconds` of its own. The first to fail or to run out of time ends them all, as TimeUp or CallFailed with
    its index; a call that keeps the loop to itself is interrupted, and it is the one that is named. The loop is the same
    from step to step: what a person's code keeps open, such as connections to a judge, belongs to its loop.
    """
    loop, gathering = _Loop.running(), _Gathering(seconds, works)
    future = asyncio.run_coroutine_threadsafe(gathering.run(), loop.loop)
    if not gathering.ended.wait(seconds + _HEAD_START_S):
        _interrupt(loop, until=gathering.ended)
        loop.give_up()
    wait([future], _HEAD_START_S)  # the others are cancelled in this time, or left to themselves
    if gathering.failed:
        index, error = gathering.failed
        raise TimeUp(index) if isinstance(error, _Interrupted) else CallFailed(error, index)
    if len(gathering.done) < len(works):
        raise TimeUp(next(index for index in range(len(works)) if index not in gathering.done))
    return [gathering.done[index] for index in range(len(works))]


class _Loop(threading.Thread):
    """An event loop that waits between steps; replaced when one did not end in time."""

    _lock = threading.Lock()
    _running: _Loop | None = None

    def __init__(self) -> None:
        super().__init__(name="event loop of reward functions", daemon=True)
        self.loop = asyncio.new_event_loop()

    @classmethod
    def running(cls) -> _Loop:
        with cls._lock:
            if cls._running is None or not cls._running.is_alive():
                cls._running = cls()
                cls._running.start()
            return cls._running

    def run(self) -> None:
        with suppress(_Interrupted, SystemExit):
            self.loop.run_forever()

    def give_up(self) -> None:
        """Let the next step have another loop: an interruption may still be on its way to this one."""
        with _Loop._lock:
            _Loop._running = None
        self.loop.call_soon_threadsafe(self.loop.stop)


class _Gathering:
    """Several calls in one loop: which have come to their end, and which failed first."""

    def __init__(self, seconds: float, works: Sequence[Work]) -> None:
        self.seconds = seconds
        self.works = works
        self.done: dict[int, tuple[Any, float]] = {}
        self.failed: tuple[int, BaseException] | None = None
        self.ended = threading.Event()

    async def run(self) -> None:
        with suppress(ExceptionGroup):  # `failed` says it
            async with asyncio.TaskGroup() as tasks:
                for index, (work, read) in enumerate(self.works):
                    tasks.create_task(self._one(index, work, read))
        self.ended.set()

    async def _one(self, index: int, work: Callable[[], Awaitable[Any]], read: Callable[[Any], Any]) -> None:
        began = time.perf_counter()
        try:
            value = read(await _awaited(work(), self.seconds))
        except GeneratorExit:
            raise  # the loop was given up, and what waited in it is thrown away
        except BaseException as error:
            self.failed = self.failed or (index, error)
            self.ended.set()
            # A SystemExit would end the loop; this ends the other calls.
            raise RuntimeError("a call failed") from None
        self.done[index] = value, time.perf_counter() - began


def _interrupt(thread: threading.Thread, until: threading.Event | None = None) -> None:
    """Raise in the thread until it ends; a bare `except:` in a loop swallows the first. Give up after a second."""
    give_up = time.monotonic() + _GRACE_S
    while thread.is_alive() and time.monotonic() < give_up and not (until and until.is_set()):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Interrupted))
        until.wait(_NUDGE_S) if until else thread.join(_NUDGE_S)
