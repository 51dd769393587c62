"""The tracker csv: metrics.csv and completions.csv in the run's folder, each written whole from the run's own files."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from backend.trainer.trackers import records
from backend.trainer.trackers.records import AboutRun, RecordReader, Sent, StepRecord
from backend.utils.whole_file import replace_file

METRICS, COMPLETIONS = "metrics.csv", "completions.csv"
REST = 20.0
"""Pause between two writings, as a multiple of what one takes: a table that grows is written ever less often, at 5 %
of a core."""
LEAST_REST_S = 5.0
COMMANDS = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet may run text that begins so as a formula."""


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
    """Write both tables from the run's files as they are now. Raises DiskError; an older table stays then."""
    folder = about.folder.path
    names: dict[str, None] = {}
    rewards: dict[str, None] = {}
    for record in _records(about):  # the columns first: a function of a later stage has one too
        names |= dict.fromkeys(record.metrics())
        rewards |= dict.fromkeys(records.reward_columns(record.groups))
    metrics = ([record.step, *map(record.metrics().get, names)] for record in _records(about))
    replace_file(folder / METRICS, _lines(["step", *names], metrics))
    groups = (group for record in _records(about) for group in record.groups)
    completions = (row for group in groups for row in records.rows(group, list(rewards)))
    replace_file(folder / COMPLETIONS, _lines(records.columns(list(rewards)), completions))


def _records(about: AboutRun) -> Iterator[StepRecord]:
    reader = RecordReader(about.folder, about.settings)
    reader.has_more = True
    while reader.has_more:
        yield from reader.read()
    yield from reader.rest()


def _lines(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """CSV in UTF-8, a row at a time, so that a table of gigabytes takes no memory."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in chain([header], rows):
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(COMMANDS) else cell for cell in row])
        yield text.getvalue().encode(errors="replace")
        text.seek(0)
        text.truncate()
