"""A process that outlives its terminal: once it is gone, what would be printed there is dropped, and the work goes on.

After a hang-up every write to the terminal fails with EIO; where stdout is a pipe, with EPIPE once its reader has ended. Neither is the run's
business, which has its event log and its log.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)
"""What a write says when nobody can read it any more. Any other error, as of a full disk behind stdout, is raised."""


class LostTerminal:
    """A text stream that drops what it is given from the moment that its terminal or pipe is gone; every other attribute is the
    stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    def writelines(self, lines: Any) -> None:
        with self._dropping():
            self._stream.writelines(lines)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._point_at_nothing()

    def _point_at_nothing(self) -> None:
        # The descriptor itself: the stream still holds what could not be written, and Python flushes it once more at exit.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ignore_sighup(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a verb one that goes on without its terminal."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = LostTerminal(streams[0]), LostTerminal(streams[1])
        try:
            return function(*args, **kwargs)
        finally:
            sys.stdout.flush()
            sys.stdout, sys.stderr = streams

    return wrapper
