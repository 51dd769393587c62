"""How far going through a large dataset has come, for whoever waits: said after some seconds, and again every few.

Who wants to hear it says so for the time of a `with`; else nothing is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from backend.spec.user_input.text import shown

T = TypeVar("T")

FIRST_S, EVERY_S = 2.0, 5.0
"""Seconds before the first sentence, and between two."""
LOOKED = 1024
"""Items between two looks at the clock."""

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener to the progress of reading", default=None)


@contextmanager
def progress_told_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Have sentences about the progress of reading given to `listener`, in this thread."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def telling(items: Iterable[T], doing: str, source: str | Path, share: Callable[[int], float]) -> Iterator[T]:
    """The items, with sentences on the way: “Checking rows.jsonl: 35%.” `share`: how much is done, 0 to 1, once so many were taken."""
    listener = _listener.get()
    if listener is None:
        yield from items
        return
    due = time.monotonic() + FIRST_S
    for number, item in enumerate(items):
        if number % LOOKED == 0 and (now := time.monotonic()) > due:
            listener(f"{doing} {shown(Path(source).name, 60)}: {share(number):.0%}.")
            due = now + EVERY_S
        yield item
