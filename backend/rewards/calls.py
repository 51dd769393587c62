"""Call sync and async user code with a time limit and validate its scores.

The reward worker's parent kills a slow process. In-process calls (`reward_isolation: thread`) run in threads that
CPython interrupts, which cannot stop C code holding the GIL.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from backend.rewards.errors import class_name, text_of
from backend.utils.text import quote

Scores = list[float | None]
Poll = Callable[[], None]
"""Called repeatedly while user code runs; raising cancels the wait."""
AsyncCall = tuple[int, Callable[[], Awaitable[Any]], Callable[[Any], Any]]
"""Function index, call, and reader of the awaited value."""

LARGEST = 1e30
"""Largest absolute score; float32 sums of squares overflow beyond it."""
ASYNC_GRACE_S = 0.2
"""Seconds for overdue async calls to be cancelled before they are interrupted."""
_CANCEL_S = 0.1
"""Seconds to cancel other async calls after a failure."""
_POLL_S = 0.05
_INTERRUPT_FOR_S = 1.0
"""Seconds to interrupt a thread before abandoning it."""
_INTERRUPT_EVERY_S = 0.05


def wait_on() -> None:
    """A poll that never cancels."""


class CallTimeoutError(Exception):
    """The function with this index timed out."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index


class CallFailedError(Exception):
    """The function with this index raised `__cause__`, possibly SystemExit."""

    def __init__(self, index: int, cause: BaseException) -> None:
        super().__init__()
        self.index = index
        self.__cause__ = cause


class InvalidScoresError(Exception):
    """Invalid scores; `index` is the first such completion."""

    def __init__(self, what: str, index: int = 0) -> None:
        super().__init__(what)
        self.index = index


class _Interrupted(BaseException):
    """Raised in a call after its time limit; not an Exception, so user code does not catch it."""


def timeout_words(seconds: float) -> str:
    return f"was still running after {seconds:g} s (reward_timeout)"


def read_scores(returned: Any, count: int) -> Scores:
    """`count` finite numbers or None, from any iterable or array. Raises InvalidScoresError."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        kind = "None" if returned is None else class_name(returned)
        raise InvalidScoresError(f"{kind} where a list of {count} scores was expected")
    values = list(values)
    if len(values) != count:
        raise InvalidScoresError(f"{len(values):,} scores for {count:,} completions")
    return [None if value is None else _score(value, index) for index, value in enumerate(values)]


def _score(value: Any, index: int) -> float:
    try:
        # Bools and any library's scalars have `__float__`. Text has not: "1" stays no number.
        number = float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError):
        number = None
    except OverflowError:
        number = math.inf
    if number is None:
        text = quote(text_of(value, repr), 40)
        raise InvalidScoresError(f"{text} ({class_name(value, 20)}) as a score, which is not a number", index)
    if not math.isfinite(number):
        raise InvalidScoresError(f"{number} as a score, which is not a finite number", index)
    if abs(number) > LARGEST:
        raise InvalidScoresError(f"{number:g} as a score, which is too large for 32 bits", index)
    return number


class Caller:
    """Calls user code in the current thread without interrupting it.

    Calls `mark(index, is_async)` before a function and `mark(-1, False)` after it.
    """

    def __init__(self, mark: Callable[[int, bool], None] = lambda index, is_async: None) -> None:
        self.poll: Poll = wait_on
        self._mark = mark
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, index: int, seconds: float, work: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        """`read(work())`, awaiting if needed, under one limit. Raises CallTimeoutError, CallFailedError."""

        def call_and_read() -> Any:
            returned = work()
            return read(asyncio.run(_awaited(returned, seconds)) if inspect.isawaitable(returned) else returned)

        self._mark(index, False)
        try:
            value = self._limited(seconds, call_and_read)
        except _Interrupted:
            raise CallTimeoutError(index) from None
        except CallFailedError as failed:
            failed.index = index
            raise
        self._mark(-1, False)
        return value

    def gather(self, seconds: float, calls: Sequence[AsyncCall]) -> list[tuple[Any, float]]:
        """(value, seconds) of concurrent calls; the first failure cancels all.

        The event loop persists between steps, since open connections belong to it. Raises as `call`.
        """
        self._loop = loop = self._loop or asyncio.new_event_loop()
        gathering = _Gathering(seconds, calls, self._mark)
        try:
            self._limited(seconds + ASYNC_GRACE_S, lambda: loop.run_until_complete(gathering.run()))
        except _Interrupted:
            self._loop = None
            blocks = gathering.failure[0] if gathering.failure else gathering.running
            raise CallTimeoutError(blocks) from None
        except BaseException:
            self._loop = None
            raise
        if gathering.failure is not None:
            index, error = gathering.failure
            raise CallTimeoutError(index) if isinstance(error, _Interrupted) else CallFailedError(index, error)
        self._mark(-1, False)
        return [gathering.results[position] for position in range(len(calls))]

    def close(self) -> None:
        """Close the event loop as `asyncio.run` does."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        with suppress(BaseException):  # user code decides what a cancellation raises
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def _limited(self, seconds: float, work: Callable[[], Any]) -> Any:
        """`work()`. Raises CallFailedError, or _Interrupted after the limit."""
        try:
            return work()
        except _Interrupted:
            raise
        except BaseException as error:
            raise CallFailedError(0, error) from error


class ThreadCaller(Caller):
    """Calls user code in threads, interrupted at the limit or when `poll` raises."""

    def _limited(self, seconds: float, work: Callable[[], Any]) -> Any:
        # A daemon thread: one that cannot be interrupted must not keep the process from ending.
        thread = _CallThread(work)
        deadline = time.monotonic() + seconds
        thread.start()
        try:
            while (left := deadline - time.monotonic()) > 0:
                thread.join(min(left, _POLL_S))
                if not thread.is_alive():
                    break
                self.poll()
        finally:
            if thread.is_alive():
                thread.interrupt()
                thread.error = _Interrupted()
        if isinstance(thread.error, _Interrupted):
            raise _Interrupted
        if thread.error is not None:
            raise CallFailedError(0, thread.error) from thread.error
        return thread.value


class _CallThread(threading.Thread):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(name="reward function", daemon=True)
        self._work = work
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        with suppress(_Interrupted):  # a second interrupt, while the handler stores the first
            try:
                self.value = self._work()
            except BaseException as error:
                self.error = error

    def interrupt(self) -> None:
        """Raise _Interrupted in the thread until it ends, since a bare `except:` may swallow it."""
        # The exception is only marked as pending; the thread raises it at its next bytecode. While it is in C that has
        # released the GIL nothing happens, hence the deadline.
        deadline = time.monotonic() + _INTERRUPT_FOR_S
        while self.is_alive() and time.monotonic() < deadline:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(_Interrupted))
            self.join(_INTERRUPT_EVERY_S)


async def _awaited(awaitable: Awaitable[Any], seconds: float) -> Any:
    """Await with asyncio's own limit, because a waiting `select` cannot be interrupted."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise _Interrupted from None
        raise  # the user's own TimeoutError


class _Gathering:
    """Concurrent calls: results by position, and the first failure."""

    def __init__(self, seconds: float, calls: Sequence[AsyncCall], mark: Callable[[int, bool], None]) -> None:
        self._seconds, self._calls, self._mark = seconds, calls, mark
        self._has_failed = asyncio.Event()
        self.results: dict[int, tuple[Any, float]] = {}
        self.failure: tuple[int, BaseException] | None = None
        self.running = calls[0][0]
        """Index of the function that ran last in the loop."""

    async def run(self) -> None:
        tasks = {asyncio.ensure_future(self._run_one(position)) for position in range(len(self._calls))}
        failed = asyncio.ensure_future(self._has_failed.wait())
        while tasks and self.failure is None:
            done, _ = await asyncio.wait({*tasks, failed}, return_when=asyncio.FIRST_COMPLETED)
            tasks -= done
        for task in (failed, *tasks):
            task.cancel()
        if tasks:  # those that ignore their cancellation are left behind
            await asyncio.wait(tasks, timeout=_CANCEL_S)

    async def _run_one(self, position: int) -> None:
        index, work, read = self._calls[position]
        start = time.perf_counter()
        try:
            self._set_running(index)
            awaitable = _Marked(work(), functools.partial(self._set_running, index))
            self.results[position] = read(await _awaited(awaitable, self._seconds)), time.perf_counter() - start
        except GeneratorExit:
            raise  # the loop was abandoned
        except BaseException as error:
            self.failure = self.failure or (index, error)
            self._has_failed.set()

    def _set_running(self, index: int) -> None:
        self.running = index
        self._mark(index, True)


class _Marked(Awaitable[Any]):
    """Calls `mark` when the awaitable resumes, to identify a blocking function."""

    def __init__(self, awaitable: Awaitable[Any], mark: Callable[[], None]) -> None:
        self._awaitable, self._mark = awaitable, mark

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._awaitable.__await__()
        resume: Callable[[], Any] = functools.partial(next, steps)
        while True:
            self._mark()
            try:
                waits_for = resume()
            except StopIteration as ended:
                return ended.value
            resume = functools.partial(next, steps)
            try:
                yield waits_for
            except BaseException as thrown:  # a cancellation; user code decides on it
                resume = functools.partial(steps.throw, thrown)
