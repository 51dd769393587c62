"""A limit on how long this thread may take for a piece of work that somebody else has written, such as rendering a chat template.

CPython raises an exception in another thread on request (PyThreadState_SetAsyncExc); one thread of ours, the watchdog, asks for it. The
exception arrives between two instructions of Python, so one long call into C is not interrupted: for that there are processes
(`backend.models.template_probe`). Entering and leaving cost a few microseconds.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.25
"""Time is counted in ticks that the watchdog has lived through, so a process that was stopped, or a machine that slept, loses at most one."""
LINGER = 20
"""Ticks that the watchdog goes on without work before it waits to be woken: waking it costs more than a tick."""
_ATTEMPTS = 3
"""How often a thread is interrupted, tick by tick: code that catches everything swallows the first."""


class TimeLimitError(BaseException):
    """The work inside `time_limit` took too long. No Exception: an `except Exception` around a step of the work must not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitError in this thread where the work inside takes longer, to about a quarter of a second. Does not nest."""
    thread = threading.get_ident()
    _watchdog.watch(thread, max(1, round(seconds / TICK_S)) + 1)
    try:
        yield
    finally:
        if _watchdog.leave(thread):
            # The exception may be on its way still: the work ended first.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


class _Watchdog:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ticks: dict[int, int] = {}  # thread → ticks left; below 0 once it was interrupted
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, thread: int, ticks: int) -> None:
        with self._lock:
            self._ticks[thread] = ticks
            if self._thread is None or not self._thread.is_alive():  # after a fork there is none
                self._thread = threading.Thread(target=self._run, name="time limits", daemon=True)
                self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def leave(self, thread: int) -> bool:
        """Stop watching. Returns whether the thread was interrupted."""
        with self._lock:
            return self._ticks.pop(thread) < 0

    def _run(self) -> None:
        idle = 0
        pause = threading.Event()  # never set
        while True:
            pause.wait(TICK_S)
            with self._lock:
                idle = 0 if self._ticks else idle + 1
                self._tick()
                if idle > LINGER:
                    self._wake.clear()
            if idle > LINGER:
                self._wake.wait()
                idle = 0

    def _tick(self) -> None:
        for thread, left in self._ticks.items():
            self._ticks[thread] = left = left - 1 if left else -1
            if -_ATTEMPTS <= left < 0:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitError))


_watchdog = _Watchdog()
