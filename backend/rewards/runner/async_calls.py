"""Awaiting a user's `async def` functions with asyncio's own time limits: one, or several in one event loop.

The loop and the thread that it runs in are the caller's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from backend.rewards.runner.step_calls import AsyncCall, CallFailed, CallTimeout


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
