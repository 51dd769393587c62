"""Following a run with one tracker until the run is over: the loop of a tracker's process.

Nothing here is waited for by the run. One process at a time serves a tracker of a run; a second one takes over when the first has ended.
"""

from __future__ import annotations

import csv
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from backend.config.config import load
from backend.export.publish.privacy import public_settings
from backend.runs.run_folder import RunFolder
from backend.trainer.trackers import records as completion_table
from backend.trainer.trackers.packages import TensorBoardFiles, TrackioRun, WandbRun
from backend.trainer.trackers.records import AboutRun, RecordReader, Sent, StepRecord, Tracker
from backend.trainer.trackers.targets import DEFAULT_PROJECT, missing_fault
from backend.utils import file_lock
from backend.utils.disk_faults import DiskError, writing
from backend.utils.errors import UserError
from backend.utils.files import make_private_folder, require_plain_files
from backend.utils.whole_file import replace_file

# The tracker csv: metrics.csv and completions.csv in the run's folder, each written whole from the run's own files.

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
    """Write both tables of what the run's files hold now. Raises DiskError; a table that was there stays then."""
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


# ── follow ───────────────────────────────────────────────────────────────────────────────────────────────────────────

MAKERS: dict[str, Callable[[], Tracker]] = {
    "csv": CsvTables, "tensorboard": TensorBoardFiles, "trackio": TrackioRun, "wandb": WandbRun,
}  # fmt: skip
POLL_S = 1.0
"""Seconds between two looks at the event log."""
HANG_S = 120.0
"""How long a tracker may do nothing after its run is over, before its process ends itself: it waits for a network, another program, or a thread of
its package that has died."""

Say = Callable[[str], None]


def track(run: RunFolder, name: str, *, may_upload: bool = False, waits: bool = False, say: Say) -> None:
    """Send all of a run to a tracker; of one that is training, until it is over. With `waits` behind another process that does so.

    Raises UserError for settings that cannot be read, a package that is missing, and, without `waits`, another process at work.
    """
    if fault := missing_fault(name):
        raise UserError([fault])
    require_plain_files(run.path)
    with writing(run.trackers):
        make_private_folder(run.trackers)
        lock = _hold(run, name, waits)
    if lock is None:
        raise UserError("to", f"Another process sends {run.name} to {name}; it ends with the run.")
    try:
        _Following(about_run(run, may_upload), MAKERS[name](), say).run()
    finally:
        os.close(lock)


def _hold(run: RunFolder, name: str, waits: bool) -> int | None:
    """The lock of this run's tracker; None where another process has it, and with `waits` still has it a while after the run."""
    path = run.trackers / f"{name}.lock"
    since = time.monotonic()
    while (lock := file_lock.try_hold(path)) is None:
        if run.is_locked():
            since = time.monotonic()
        if not waits or time.monotonic() - since > 2 * HANG_S:
            return None
        time.sleep(POLL_S)
    return lock


def about_run(run: RunFolder, may_upload: bool = False) -> AboutRun:
    """What a tracker is told about the run. Raises UserError for a config.yaml that cannot be read."""
    config = load(run.config)
    settings = public_settings(config.model_dump(mode="json"))
    return AboutRun(
        run, config.tracker_project or DEFAULT_PROJECT, config.tracker_run_name or run.name, settings, may_upload
    )


class _Following:
    """One tracker's way through one run."""

    def __init__(self, about: AboutRun, tracker: Tracker, say: Say) -> None:
        self._about, self._tracker, self._say = about, tracker, say
        self._reader = RecordReader(about.folder, about.settings)
        self._sent = Sent()
        self._last_sign = time.monotonic()
        self._last_fault = ""
        self._has_ended = threading.Event()

    def run(self) -> None:
        threading.Thread(target=self._end_a_hang, name="tracker's watch", daemon=True).start()
        try:
            self._follow()
        finally:
            self._has_ended.set()

    def _follow(self) -> None:
        self._sent = self._tracker.open(self._about)
        is_over = False
        while not is_over:
            is_over = not self._about.folder.is_locked()  # asked first: what is read after that is all there will be
            self._take_news()
            if not is_over:
                self._flush()
                time.sleep(POLL_S)
        self._send(self._reader.rest())
        self._flush()
        self._tracker.close(self._reader.ending)

    def _take_news(self) -> None:
        has_more = True
        while has_more:
            records = self._reader.read()
            if self._reader.has_restarted:
                self._sent = self._tracker.open(self._about)
            self._send(records)
            has_more = self._reader.has_more

    def _send(self, records: list[StepRecord]) -> None:
        for record in records:
            if (news := self._sent.news_in(record)) is not None:
                self._tracker.send(news)
                self._sent.add(news)
            self._last_sign = time.monotonic()

    def _flush(self) -> None:
        """What a full disk refuses is tried again at the next turn, and said once."""
        self._last_sign = time.monotonic()
        try:
            self._tracker.flush(self._sent)
            self._last_fault = ""
        except DiskError as fault:
            sentence = fault.faults[0].sentence
            if sentence != self._last_fault:
                self._say(sentence)
            self._last_fault = sentence

    def _end_a_hang(self) -> None:
        """End this process where the run is over and the tracker has been waiting for an answer too long. Not once all is sent: the
        process may be another program's then."""
        while not self._has_ended.wait(min(POLL_S, HANG_S)):
            if not self._about.folder.is_locked() and time.monotonic() - self._last_sign > HANG_S:
                self._say(f"No answer for {HANG_S:.0f} s after the run was over; track sends the rest another time.")
                sys.stdout.flush()
                os._exit(1)
