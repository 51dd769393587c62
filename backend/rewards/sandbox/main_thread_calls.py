"""Call a user's code in the main thread of the scoring process, with no limit but its parent's, who kills the process.

The main thread is where Python's signal handlers run, so code with alarms of its own works here. `mark` is told what is called.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

from backend.rewards.runner.step_calls import AsyncCall, CallFailed
from backend.rewards.runner.timeout import Gathering
from backend.rewards.sandbox.wire import FIRST_ASYNC, FIRST_CALL, IDLE


class MainThreadCaller:
    """One for the life of the process: the event loop of async functions lasts from step to step."""

    def __init__(self, mark: Callable[[int], None]) -> None:
        self._mark = mark
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, index: int, seconds: float, work: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        self._mark(FIRST_CALL + index)
        try:
            returned = work()
            value = read(asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned)
        except BaseException as error:
            raise CallFailed(error) from error  # with the mark left standing: its text is a user's code too
        self._mark(IDLE)
        return value

    def gather(self, indices: Sequence[int], seconds: float, calls: Sequence[AsyncCall]) -> list[tuple[Any, float]]:
        self._loop = self._loop or asyncio.new_event_loop()
        marked = [(self._marked(index, work), read) for index, (work, read) in zip(indices, calls, strict=True)]
        results = self._loop.run_until_complete(_gathered(seconds, marked)).outcome()
        self._mark(IDLE)
        return results

    def close(self) -> None:
        """End what a user's code has left in the loop, as `asyncio.run` does. Python would say of each task that it was destroyed."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        with suppress(BaseException):  # whatever a user's code does when it is cancelled
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_S))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def _marked(self, index: int, work: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        def marked() -> Awaitable[Any]:
            self._mark(FIRST_ASYNC + index)
            return _Marked(work(), lambda: self._mark(FIRST_ASYNC + index))

        return marked


class _Marked(Awaitable[Any]):
    """An awaitable that calls `mark` whenever it goes on: of one that keeps the event loop, the mark is left standing."""

    def __init__(self, awaitable: Awaitable[Any], mark: Callable[[], None]) -> None:
        self._awaitable, self._mark = awaitable, mark

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._awaitable.__await__()
        error: BaseException | None = None
        while True:
            self._mark()
            try:
                waits_for = next(steps) if error is None else _thrown(steps, error)
            except StopIteration as ended:
                return ended.value
            error = None
            try:
                yield waits_for  # what a Task sends is always None
            except (
                BaseException
            ) as thrown:  # a cancellation, or the end of the generator: the user's code decides on it
                error = thrown


def _thrown(steps: Any, error: BaseException) -> Any:
    if hasattr(steps, "throw"):
        return steps.throw(error)
    raise error


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _gathered(seconds: float, calls: Sequence[AsyncCall]) -> Gathering:
    """Over once all calls have ended or one has failed, whether the others heed their cancellation or not."""
    is_ended = asyncio.Event()
    gathering = Gathering(seconds, calls, is_ended)
    running = asyncio.ensure_future(gathering.run())
    await is_ended.wait()
    if gathering.failure is None:
        await running
    else:
        await asyncio.wait([running], timeout=CANCEL_S)
    return gathering


CANCEL_S = 0.1
"""How long the other calls may take to be cancelled once one has failed."""
