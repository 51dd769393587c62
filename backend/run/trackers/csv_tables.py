"""The tracker csv: metrics.csv and completions.csv in the run's folder, each written whole from the run's own files.

So there is nothing to send twice and nothing to miss, and after a resume the tables have the run's steps and no others.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from backend.run.trackers import completion_table
from backend.run.trackers.records import RecordReader, Sent, StepRecord
from backend.run.trackers.tracker import AboutRun
from backend.spec.whole_file import replace_file

METRICS, COMPLETIONS = "metrics.csv", "completions.csv"
REST = 20.0
"""Between two writings at least this many times as long as one takes: a table that grows is written ever less often, at 5 % of a core."""
LEAST_REST_S = 5.0
COMMANDS = ("=", "+", "-", "@", "\t", "\r")
"""Text that begins so may be run as a formula by a spreadsheet."""


class CsvTables:
    """Writes both tables when they are due, and at the end."""

    def __init__(self) -> None:
        self._about: AboutRun | None = None
        self._is_behind = False
        self._due = 0.0

    def open(self, about: AboutRun) -> Sent:
        self._about, self._is_behind = about, True
        return Sent()

    def send(self, record: StepRecord) -> None:
        self._is_behind = True

    def flush(self, sent: Sent) -> None:
        if self._is_behind and time.monotonic() >= self._due:
            self._write()

    def close(self, ending: str) -> None:
        if self._is_behind:
            self._write()

    def _write(self) -> None:
        began = time.monotonic()
        assert self._about is not None
        try:
            write_tables(self._about)
            self._is_behind = False
        finally:  # a full disk is tried again, no sooner than a table that was written
            now = time.monotonic()
            self._due = now + max(LEAST_REST_S, REST * (now - began))


def write_tables(about: AboutRun) -> None:
    """Write both tables of what the run's files hold now. Raises DiskFault; a table that was there stays then."""
    folder = about.folder.path
    names: dict[str, None] = {}
    rewards: dict[str, None] = {}
    for record in _records(about):  # the columns first: a function of a later stage has one too
        names |= dict.fromkeys(record.metrics())
        rewards |= dict.fromkeys(completion_table.reward_columns(record.groups))
    metrics = ([record.step, *map(record.metrics().get, names)] for record in _records(about))
    _replace(folder / METRICS, ["step", *names], metrics)
    completions = (
        row for record in _records(about) for group in record.groups for row in completion_table.rows(group, list(rewards))
    )  # fmt: skip
    _replace(folder / COMPLETIONS, completion_table.columns(list(rewards)), completions)


def _records(about: AboutRun) -> Iterator[StepRecord]:
    reader = RecordReader(about.folder, about.settings)
    reader.has_more = True
    while reader.has_more:
        yield from reader.read()
    yield from reader.rest()


def _replace(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    replace_file(path, _lines(chain([header], rows)))


def _lines(rows: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """CSV in UTF-8, a row at a time, so that a table of gigabytes takes no memory."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([_cell(value) for value in row])
        yield text.getvalue().encode(errors="replace")
        text.seek(0)
        text.truncate()


def _cell(value: Any) -> Any:
    """A number as the shortest text that reads back as the same; None as an empty cell; text that no spreadsheet takes for a formula."""
    if isinstance(value, str) and value.startswith(COMMANDS):
        return f"'{value}"
    return value
