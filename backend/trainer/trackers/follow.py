"""Following a run with one tracker until the run is over, in a process of its own that the run does not wait for.

One process at a time serves a tracker of a run; a second one takes over when the first has ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend.config.config import load
from backend.export.privacy import public_settings
from backend.runs.run_folder import RunFolder
from backend.trainer.trackers.csv_tables import CsvTables
from backend.trainer.trackers.packages import TensorBoardFiles, TrackioRun, WandbRun
from backend.trainer.trackers.records import AboutRun, RecordReader, Sent, StepRecord, Tracker
from backend.trainer.trackers.targets import DEFAULT_PROJECT, missing_fault
from backend.utils import file_lock
from backend.utils.disk_faults import DiskError, disk_fault, fault_of, writing
from backend.utils.errors import UserError
from backend.utils.files import make_private_folder, require_plain_files
from backend.utils.text import quote

MAKERS: dict[str, Callable[[], Tracker]] = {
    "csv": CsvTables,
    "tensorboard": TensorBoardFiles,
    "trackio": TrackioRun,
    "wandb": WandbRun,
}
POLL_S = 1.0
"""Seconds between two reads of the event log."""
HANG_S = 120.0
"""How long a tracker may do nothing after its run is over before its process ends itself: it waits for a network,
another program, or a thread of its package that has died."""
NICE = 10
LONGEST = 160
"""Characters of a sentence about what a package has said or raised."""

Say = Callable[[str], None]


def track(run: RunFolder, name: str, *, may_upload: bool = False, waits: bool = False, say: Say) -> None:
    """Send all of a run to a tracker; of one that is training, until it is over. With `waits` behind another process
    that does so.

    Raises UserError for settings that cannot be read, a package that is missing, and, without `waits`, another
    process at work.
    """
    if fault := missing_fault(name):
        raise UserError([fault])
    require_plain_files(run.path)
    with writing(run.trackers):
        make_private_folder(run.trackers)
        path, since = run.trackers / f"{name}.lock", time.monotonic()
        while (lock := file_lock.try_hold(path)) is None:
            if run.is_locked():
                since = time.monotonic()
            if not waits or time.monotonic() - since > 2 * HANG_S:
                raise UserError("to", f"Another process sends {run.name} to {name}; it ends with the run.")
            time.sleep(POLL_S)
    try:
        _Following(about_run(run, may_upload), MAKERS[name](), say).run()
    finally:
        os.close(lock)


def about_run(run: RunFolder, may_upload: bool = False) -> AboutRun:
    """What a tracker gets to know about the run. Raises UserError for a config.yaml that cannot be read."""
    config = load(run.config)
    settings = public_settings(config.model_dump(mode="json"))
    project, name = config.tracker_project or DEFAULT_PROJECT, config.tracker_run_name or run.name
    return AboutRun(run, project, name, settings, may_upload)


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
            self._sent = self._tracker.open(self._about)
            is_over = False
            while not is_over:
                is_over = not self._about.folder.is_locked()  # first: what is read after that is complete
                has_more = True
                while has_more:
                    records = self._reader.read()
                    if self._reader.has_restarted:
                        self._sent = self._tracker.open(self._about)
                    self._send(records)
                    has_more = self._reader.has_more
                if not is_over:
                    self._flush()
                    time.sleep(POLL_S)
            self._send(self._reader.rest())
            self._flush()
            self._tracker.close(self._reader.ending)
        finally:
            self._has_ended.set()

    def _send(self, records: list[StepRecord]) -> None:
        for record in records:
            if (news := self._sent.news_in(record)) is not None:
                self._tracker.send(news)
                self._sent.add(news)
            self._last_sign = time.monotonic()

    def _flush(self) -> None:
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
        """End this process where the run is over and the tracker has been waiting too long. Not once all is sent:
        the process may be another program's then."""
        while not self._has_ended.wait(min(POLL_S, HANG_S)):
            if not self._about.folder.is_locked() and time.monotonic() - self._last_sign > HANG_S:
                self._say(f"No answer for {HANG_S:.0f} s after the run was over; track sends the rest another time.")
                sys.stdout.flush()
                os._exit(1)


def main(arguments: list[str]) -> int:
    """A tracker's process as a run starts it, with low priority: NAME FOLDER → the exit code."""
    name, folder = arguments
    process = _Process(RunFolder(Path(folder)), name)
    threading.excepthook = process.end_with_thread
    warnings.showwarning = process.pass_on
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        track(process.run, name, waits=True, say=process.complain)
    except UserError as error:
        for fault in error.faults:
            process.end(str(fault))
        return 2
    except Exception as error:  # whatever a package raises
        process.end_with(error)
        return 1
    return 0


class _Process:
    """Writes what a tracker's process reports, to its own log, and to the run's log where the run does not report
    it."""

    def __init__(self, run: RunFolder, name: str) -> None:
        self.run, self._name = run, name
        self._told: set[str] = set()

    def complain(self, sentence: str) -> None:
        """Report a problem, once, and continue."""
        if sentence not in self._told:
            self._told.add(sentence)
            _print(sentence)
            self._append(sentence)

    def end(self, sentence: str) -> None:
        """The last line: a run that continues reads it from the end of this process's log."""
        _print(sentence)
        if not self.run.is_locked():
            self._append(sentence)

    def end_with(self, error: BaseException | None) -> None:
        if error is not None and fault_of(error) is not None:
            return self.end(disk_fault(self.run.trackers / self._name, error).faults[0].sentence)
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
        self.end(f"{type(error).__name__}: {quote(error, LONGEST)}")

    def end_with_thread(self, what: threading.ExceptHookArgs) -> None:
        """A thread of a package has died, as tensorboardX's writer does on a full disk: sending to it would wait for
        ever."""
        self.end_with(what.exc_value)
        os._exit(1)

    def pass_on(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        """A package's warning to its user: so trackio says that its database cannot be written."""
        if category is UserWarning:
            self.complain(quote(message, LONGEST))

    def _append(self, sentence: str) -> None:
        """In one piece, as every line of that log; it is not created, for the folder may have been moved away."""
        with contextlib.suppress(OSError):
            log = os.open(self.run.log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
            os.write(log, f"{self._name}: {sentence}\n".encode(errors="replace"))
            os.close(log)


def _print(sentence: str) -> None:
    with contextlib.suppress(OSError):  # the disk is full
        sys.stdout.write(f"{sentence}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
