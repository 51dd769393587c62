"""The signals that mean "save and stop", for every process that holds work: training, sweeps, evaluation, export, the queue.

SIGTERM and Ctrl-C (SIGINT) are requests. SIGHUP comes when the terminal is closed or the connection to it is lost; a process that was
started with it ignored, as under `nohup`, goes on ignoring it. SIGXCPU is a batch system's warning that the processor time is nearly used
up; SIGKILL follows. SIGQUIT (Ctrl-\\) is left as the system has it: it ends a process at once and saves nothing, for whoever wants just
that, and the run goes on from its newest checkpoint as after a power cut.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)

Handler = Callable[[int, FrameType | None], Any]


def handle(handler: Handler) -> None:
    """Call `handler` for every stop signal. To be called in the main thread, as `signal.signal` requires."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores it for us
            signal.signal(number, handler)


def unblock() -> None:
    """Let them through: the program before this one, in the same process, may have blocked them for its exec."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def block() -> None:
    """Hold them back in this thread; they stay pending."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@dataclass(slots=True)
class Afterwards:
    """What follows a block of `handlers_restored`."""

    process_ends: bool = False
    """It has stopped or failed, saved what there was, and only its exit code is left to be given: one more signal must not change that."""


@contextmanager
def handlers_restored() -> Iterator[Afterwards]:
    """Leave every handler as it was before the block; where the process ends after it, all stop signals ignored."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    afterwards = Afterwards()
    try:
        yield afterwards
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if afterwards.process_ends else handler)


class StopRequested(BaseException):
    """Raised by `raising_stop`. No Exception, as KeyboardInterrupt is none: nothing between must take it for an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} was received")


@contextmanager
def raising_stop() -> Iterator[None]:
    """Raise StopRequested in the main thread at the first stop signal, wherever it is: for work whose files are whole or absent at any
    moment. Later signals are ignored, so that they do not interrupt what is cleaned up."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise StopRequested(number)

    with handlers_restored():
        handle(stop)
        yield
