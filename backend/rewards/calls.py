"""Call sync and async user code, and validate its scores. The reward worker's parent kills a slow process. In-process
calls (`reward_isolation: thread`) run in threads that CPython interrupts, which cannot stop C code holding the GIL."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import math
import sys
import threading
import time
import traceback
import types
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Set
from contextlib import suppress
from typing import Any

from backend.rewards.errors import class_name, text_of
from backend.utils.text import quote

Scores = list[float | None]
Poll = Callable[[], None]  # called repeatedly while user code runs; raising cancels the wait

LARGEST = 1e30  # largest absolute score; float32 sums of squares overflow beyond it
_CANCEL_S = 0.1  # seconds for async calls to end after their cancellation
_ASYNC_GRACE_S = 0.3  # seconds past the limit before async calls that hold up the event loop are interrupted
_POLL_S = 0.05
_INTERRUPT_FOR_S = 1.0  # seconds to interrupt a thread before abandoning it


def wait_on() -> None:
    """A poll that never cancels."""


class CallError(Exception):
    """The function with this index raised `error`, possibly SystemExit. None: it hung, and was at `stack`. `runs_on`:
    its thread could not be interrupted."""

    def __init__(self, index: int, error: BaseException | None, stack: str = "", *, runs_on: bool = False) -> None:
        super().__init__()
        self.index, self.error, self.stack, self.runs_on = index, error, stack, runs_on


class BadReturnError(Exception):
    """What a function returned is unusable; `index` is the completion or row to blame, None if their number is wrong.
    `what`: words after the function's name."""

    def __init__(self, what: str, index: int | None = None) -> None:
        super().__init__(what)
        self.what, self.index = what, index


class _Interrupted(BaseException):
    """Raised in a call after its time limit; not an Exception, so user code does not catch it."""


def timeout_words(seconds: float) -> str:
    """Words after the name of a function that hangs."""
    return f"was still running after {seconds:g} s (reward_timeout)"


def read_scores(returned: Any, count: int) -> Scores:
    """`count` finite numbers or None, from any iterable or array. Raises BadReturnError."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        kind = "None" if returned is None else class_name(returned)
        raise BadReturnError(f"returned {kind} where a list of {count} scores was expected")
    values = list(values)
    if len(values) != count:
        raise BadReturnError(f"returned {len(values):,} scores for {count:,} completions")
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
        raise BadReturnError(f"returned {text} ({class_name(value, 20)}) as a score, which is not a number", index)
    if not math.isfinite(number):
        raise BadReturnError(f"returned {number} as a score, which is not a finite number", index)
    if abs(number) > LARGEST:
        raise BadReturnError(f"returned {number:g} as a score, which is too large for 32 bits", index)
    return number


class Caller:
    """Calls user code in the current thread, without a limit unless it is async. Calls `mark(index, True)` before a
    function and `mark(-1, True)` after it. Of functions that are awaited together `mark(index, False)` says which one
    is running, or waits."""

    def __init__(self, mark: Callable[[int, bool], None] = lambda index, begins: None) -> None:
        self.poll: Poll = wait_on
        self._report = mark
        self._running = -1
        self._runner: asyncio.Runner | None = None

    def call(self, index: int, seconds: float, work: Callable[[], Any]) -> Any:
        """`work()`. Raises CallError."""
        self._mark(index)
        value = self._limited(seconds, work)
        self._mark(-1)
        return value

    def gather(self, seconds: float, calls: Mapping[int, Awaitable[Any]]) -> dict[int, tuple[Any, float]]:
        """(value, seconds) of concurrent calls by index; the first failure cancels all. Raises CallError. The event
        loop persists between steps, since open connections belong to it."""
        results: dict[int, tuple[Any, float]] = {}
        failures: list[CallError] = []

        async def run_one(index: int, awaitable: Awaitable[Any]) -> None:
            start = time.perf_counter()
            try:
                value = await _marked(awaitable, functools.partial(self._mark, index, False))
                results[index] = value, time.perf_counter() - start
            except GeneratorExit:
                raise  # the loop was abandoned
            except BaseException as error:
                failures.append(CallError(index, error))
            if waiting := [other for other in calls if other not in results]:
                self._mark(waiting[0], False)

        async def run_all() -> None:
            pending = {asyncio.ensure_future(run_one(*call)) for call in calls.items()}
            end = time.monotonic() + seconds
            while pending and not failures:
                left = end - time.monotonic()
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    failures.append(CallError(self._running, None, _stack_of(calls[self._running])))
            for task in pending:
                task.cancel()
            if pending:  # those that ignore their cancellation are left behind
                await asyncio.wait(pending, timeout=_CANCEL_S)

        self._runner, runner = None, self._runner or asyncio.Runner()
        self._mark(min(calls))
        self._limited(seconds + _ASYNC_GRACE_S, lambda: runner.run(run_all()))
        if failures:
            raise failures[0]
        self._runner = runner
        self._mark(-1)
        return results

    def _mark(self, index: int, begins: bool = True) -> None:
        self._running = index
        self._report(index, begins)

    def close(self) -> None:
        """Cancel what still runs on the event loop, and close it."""
        with suppress(BaseException):  # user code decides what a cancellation raises
            if self._runner:
                self._runner.close()

    def _limited(self, seconds: float, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except CallError:
            raise
        except BaseException as error:
            raise CallError(self._running, error) from error


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
        deadline, stack = time.monotonic() + seconds, ""
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
            hung = self._running
            if frame := sys._current_frames().get(thread.ident or 0):
                stack = "".join(traceback.format_stack(frame))
            while thread.is_alive() and time.monotonic() < until:
                interrupt = ctypes.py_object(_Interrupted)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), interrupt)
                thread.join(_POLL_S)
        error = outcome.get("error")
        if was_interrupted:
            raise CallError(hung, None, stack, runs_on=thread.is_alive())
        if isinstance(error, CallError):
            raise error
        if error is not None:
            raise CallError(self._running, error) from error
        return outcome["value"]


def _stack_of(awaitable: Any) -> str:
    """Where a coroutine waits, outermost frame first."""
    stack = ""
    while (frame := getattr(awaitable, "cr_frame", None)) is not None:
        stack += "".join(traceback.format_stack(frame))
        awaitable = awaitable.cr_await
    return stack


@types.coroutine
def _marked(awaitable: Awaitable[Any], mark: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Await, calling `mark` whenever the awaitable starts to run."""
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
