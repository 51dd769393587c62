"""Progress of a run's start: reading or fetching a dataset, loading a model. The lines are in the run's log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from backend.utils.text import quote

T = TypeVar("T")

FIRST_S, EVERY_S = 2.0, 2.0  # seconds before the first line, and between two
LOOKED = 1024  # rows between two looks at the clock
_LINE = re.compile(
    r"(?P<doing>.{1,200}?)(?:…|: (?P<percent>\d{1,3})%, (?P<figures>[\d.,]+ [A-Za-z]+, [\d.,]+ [A-Za-z]+/s)\.)"
)
_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener to the progress of a start", default=None)
_look: ContextVar[Callable[[], None]] = ContextVar("look for a stop of a start", default=lambda: None)


@dataclass(frozen=True, slots=True)
class StartProgress:
    """`doing`: “Checking rows.jsonl”. `share`: 0 to 1, or None. `figures`: “1,204,000 rows, 310,000 rows/s”."""

    doing: str
    share: float | None = None
    figures: str = ""

    @property
    def line(self) -> str:
        """“Checking rows.jsonl: 35%, 1,204,000 rows, 310,000 rows/s.”, or “Fetching a/b…”."""
        return f"{self.doing}…" if self.share is None else f"{self.doing}: {self.share:.0%}, {self.figures}."

    @classmethod
    def read(cls, line: str) -> StartProgress | None:
        """The progress in such a line; None of any other line."""
        if (found := _LINE.fullmatch(line)) is None:
            return None
        doing, percent, figures = found.groups()
        return cls(doing) if percent is None else cls(doing, min(100, int(percent)) / 100, figures)


@contextmanager
def progress_listener(listener: Callable[[str], None]) -> Generator[None]:
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def with_stop_check(look: Callable[[], None]) -> Generator[None]:
    """Call `look` after each line too, and during downloads, so that an exception of it ends the work."""
    listener, token = _listener.get() or (lambda line: None), _look.set(look)
    try:
        with progress_listener(lambda line: (listener(line), look())[0]):
            yield
    finally:
        _look.reset(token)


def tell(doing: str) -> None:
    """Report the beginning of work of unknown length."""
    if (listener := _listener.get()) is not None:
        listener(StartProgress(doing).line)


def telling(
    items: Iterable[T],
    doing: str,
    source: str | Path,
    share: Callable[[int], float],
    *,
    amount: Callable[[int], float] = float,
    unit: str = "rows",
    looked: int = LOOKED,
) -> Iterator[T]:
    """The items, with reports such as “Checking rows.jsonl: 35%, 1,204,000 rows, 310,000 rows/s.” `share` and `amount`
    of the number of items so far: 0 to 1, and in `unit`. `looked`: items between two looks at the clock."""
    listener = _listener.get()
    if listener is None:
        yield from items
        return
    began = time.monotonic()
    due = began + FIRST_S

    def say(number: int, done: float) -> None:
        figures = _figures(amount(number), unit, began)
        listener(StartProgress(f"{doing} {quote(Path(source).name, 60)}", done, figures).line)

    number, was_said = 0, False
    for item in items:
        if number % looked == 0 and (now := time.monotonic()) > due:
            say(number, share(number))
            due, was_said = now + EVERY_S, True
        yield item
        number += 1
    if was_said:  # or the last line would stand for work that is done
        say(number, 1.0)


class DownloadListener:
    """For `hub.download`: reports “Fetching a/b…”, then its share at each new percent, and looks for a stop."""

    def __init__(self, doing: str) -> None:
        # Read here, since the download's threads have contexts without them.
        self._say, self.check = _listener.get() or (lambda line: None), _look.get()
        self._doing, self._percent = doing, ""
        self._began = self._said = time.monotonic()

    def report(self, state: dict[str, Any]) -> None:
        if state["total"] is None:
            self._say(StartProgress(self._doing).line)
            return
        share, now = state["done"] / max(1, state["total"]), time.monotonic()
        is_due = now - self._said >= EVERY_S or (self._percent and state["phase"] == "linking")
        if is_due and f"{share:.0%}" != self._percent:
            self._percent, self._said = f"{share:.0%}", now
            self._say(StartProgress(self._doing, share, _figures(state["done"] / 1e6, "MB", self._began)).line)

    def sleep(self, seconds: float) -> None:
        self.check()
        time.sleep(seconds)


def _figures(amount: float, unit: str, began: float) -> str:
    def figure(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"

    rate = amount / max(time.monotonic() - began, 1e-3)
    return f"{figure(amount)} {unit}, {figure(rate)} {unit}/s"
