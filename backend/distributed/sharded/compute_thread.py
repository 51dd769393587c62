"""A thread in which rank 0 computes with a model that is divided, while its main thread keeps an eye on the other ranks.

A pass of such a model contains sums over the ranks, which hang for ever when a rank is lost. The main thread waits beside it and is woken by
what the control channel knows; it then ends the run as alone, and saves: all that it needs for that is whole and evaluated. The process
must end with `os._exit`, since this thread may never return. All of the model's work is this thread's, because mlx ties graphs to threads.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 0.1
"""Seconds between two looks at the other ranks."""
TOLD_WITHIN_S = 20.0
"""How long a pass whose link failed waits for the channel to say which machine it was."""
_OF_LINK = re.compile(r"\[(ring|mpi|jaccl|nccl|distributed)\]|peer|communicat", re.IGNORECASE)
"""What mlx says of a link that has failed."""


class ComputeThread:
    """`check` raises what is known of a lost rank."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="sharded model", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises, made in the thread. Raises what `check` raises as soon as it does."""
        if threading.current_thread() is self._thread:
            return call()
        result: Future[T] = Future()
        self._calls.put((call, result))
        while True:
            try:
                error = result.exception(POLL_S)
                break
            except TimeoutError:
                self._check()
        if error is None:
            return result.result()
        if isinstance(error, RuntimeError) and _OF_LINK.search(str(error)):
            self._wait_for_word()
        raise error

    def _wait_for_word(self) -> None:
        ends = time.monotonic() + TOLD_WITHIN_S
        while time.monotonic() < ends:
            self._check()
            time.sleep(POLL_S)

    def _work(self) -> None:
        while True:
            call, result = self._calls.get()
            try:
                value = call()
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)
            del call, result  # they hold arrays
