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
import types
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from backend.rewards.errors import class_name, text_of
from backend.utils.text import quote

Scores = list[float | None]
Poll = Callable[[], None]  # called repeatedly while user code runs; raising cancels the wait
AsyncCall = tuple[int, Callable[[], Awaitable[Any]], Callable[[Any], Any]]
"""Function index, call, and reader of the awaited value."""

LARGEST = 1e30  # largest absolute score; float32 sums of squares overflow beyond it
ASYNC_GRACE_S = 0.2  # seconds for overdue async calls to be cancelled before they are interrupted
_CANCEL_S = 0.1  # seconds to cancel other async calls after a failure
_POLL_S = 0.05
_INTERRUPT_FOR_S = 1.0  # seconds to interrupt a thread before abandoning it


def wait_on() -> None:
    """A poll that never cancels."""


class CallError(Exception):
    """The function with this index raised `error`, possibly SystemExit; None: it timed out."""

    def __init__(self, index: int, error: BaseException | None) -> None:
        super().__init__()
        self.index = index
        self.error = None if isinstance(error, _Interrupted) else error


class InvalidScoresError(Exception):
    """Invalid scores; `index` is the first such completion."""

    def __init__(self, what: str, index: int = 0) -> None:
        super().__init__(what)
        self.index = index


class _Interrupted(BaseException):
    """Raised in a call after its time limit; not an Exception, so user code does not catch it."""


def timeout_words(seconds: float) -> str:
    """Words after the name of a function that hangs."""
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
        self._running = -1  # index of the async function that ran last
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, index: int, seconds: float, work: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        """`read(work())`, awaiting if needed, under one limit. Raises CallError."""

        def call_and_read() -> Any:
            returned = work()
            return read(asyncio.run(_awaited(returned, seconds)) if inspect.isawaitable(returned) else returned)

        self._mark(index, False)
        try:
            value = self._limited(seconds, call_and_read)
        except CallError as failed:
            failed.index = index
            raise
        self._mark(-1, False)
        return value

    def gather(self, seconds: float, calls: Sequence[AsyncCall]) -> list[tuple[Any, float]]:
        """(value, seconds) of concurrent calls; the first failure cancels all. Raises CallError.

        The event loop persists between steps, since open connections belong to it.
        """
        results: dict[int, tuple[Any, float]] = {}
        failures: list[CallError] = []

        async def run_one(index: int, work: Callable[[], Awaitable[Any]], read: Callable[[Any], Any]) -> None:
            start = time.perf_counter()
            try:
                value = await _awaited(_marked(work(), functools.partial(self._mark_async, index)), seconds)
                results[index] = read(value), time.perf_counter() - start
            except GeneratorExit:
                raise  # the loop was abandoned
            except BaseException as error:
                failures.append(CallError(index, error))

        async def run_all() -> None:
            tasks = {asyncio.ensure_future(run_one(*call)) for call in calls}
            while tasks and not failures:
                _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            if tasks:  # those that ignore their cancellation are left behind
                await asyncio.wait(tasks, timeout=_CANCEL_S)

        self._loop = loop = self._loop or asyncio.new_event_loop()
        self._mark_async(calls[0][0])
        try:
            self._limited(seconds + ASYNC_GRACE_S, lambda: loop.run_until_complete(run_all()))
        except BaseException as error:
            self._loop = None
            if not isinstance(error, CallError):
                raise
            failures.append(CallError(self._running, error.error))
        if failures:
            raise failures[0]
        self._mark(-1, False)
        return [results[index] for index, _, _ in calls]

    def _mark_async(self, index: int) -> None:
        self._running = index
        self._mark(index, True)

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
        try:
            return work()
        except BaseException as error:
            raise CallError(-1, error) from error


class ThreadCaller(Caller):
    """Calls user code in threads, interrupted at the limit or when `poll` raises."""

    def _limited(self, seconds: float, work: Callable[[], Any]) -> Any:
        outcome: dict[str, Any] = {}

        def run() -> None:
            with suppress(_Interrupted):  # a second interrupt, while the handler stores the first
                try:
                    outcome["value"] = work()
                except BaseException as error:
                    outcome["error"] = error

        # A daemon thread: one that cannot be interrupted must not keep the process from ending.
        thread = threading.Thread(target=run, name="reward function", daemon=True)
        deadline = time.monotonic() + seconds
        thread.start()
        try:
            while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                thread.join(min(left, _POLL_S))
                if thread.is_alive():
                    self.poll()
        finally:
            # The exception is only pending until the thread's next bytecode, and a bare `except:` may swallow it.
            until = time.monotonic() + _INTERRUPT_FOR_S
            was_interrupted = thread.is_alive()
            while thread.is_alive() and time.monotonic() < until:
                interrupt = ctypes.py_object(_Interrupted)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), interrupt)
                thread.join(_POLL_S)
        if was_interrupted or "error" in outcome:
            raise CallError(-1, None if was_interrupted else outcome["error"])
        return outcome["value"]


async def _awaited(awaitable: Awaitable[Any], seconds: float) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise _Interrupted from None
        raise  # the user's own TimeoutError


@types.coroutine
def _marked(awaitable: Awaitable[Any], mark: Callable[[], None]) -> Generator[Any, Any, Any]:
    steps: Any = awaitable.__await__()
    resume: Callable[[], Any] = functools.partial(next, steps)
    while True:
        mark()
        try:
            waits_for = resume()
        except StopIteration as ended:
            return ended.value
        resume = functools.partial(next, steps)
        try:
            yield waits_for
        except BaseException as thrown:  # a cancellation; user code decides on it
            resume = functools.partial(steps.throw, thrown)
