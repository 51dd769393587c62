"""Trackers follow a run's event log, each in a process of its own that the run starts and does not wait for."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from backend.config.config import load
from backend.export.privacy import public_settings
from backend.runs.run_folder import RunFolder
from backend.trainer.trackers.packages import MAKERS, AboutRun, RecordReader, StepRecord, Tracker
from backend.trainer.trackers.targets import DEFAULT_PROJECT, TRACKERS, chosen, missing_fault
from backend.utils import file_lock
from backend.utils.child_process import module_command, start_beside
from backend.utils.disk import DiskError, disk_fault, fault_of, writing
from backend.utils.errors import UserError
from backend.utils.files import last_line, make_private_folder, require_plain_files
from backend.utils.text import quote

POLL_S = 1.0  # seconds between two reads of the event log
HANG_S = 120.0  # seconds without progress after its run is over from which a tracker's process ends itself
NICE = 10
LONGEST = 160

Say = Callable[[str], None]


class RunTrackers:
    """The trackers of a run, which only checks whether they are alive."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, report_to: Sequence[str], tell: Say) -> None:
        """Start a process for each that `report_to` chooses. It ends with the run; `tell` takes a sentence for each."""
        for name in chosen(report_to):
            if fault := missing_fault(name):  # a run that is resumed where the package is no more
                tell(f"{fault.sentence} The run goes on without it.")
                continue
            command = [*module_command("backend.trainer.trackers.follow"), name, str(self._run.path)]
            folder = self._run.trackers
            try:
                with writing(folder):
                    make_private_folder(folder)
                    with (folder / f"{name}.log").open("ab") as log:
                        self._processes[name] = start_beside(command, folder, log)
            except DiskError as error:
                tell(f"{name} is not started: {error.faults[0].sentence}")
            else:
                tell(f"What {name} writes of this run is in {TRACKERS[name].place}.")

    def look(self, warn: Say) -> None:
        for name, process in list(self._processes.items()):
            if (code := process.poll()) is None:
                continue
            del self._processes[name]
            last = quote(last_line(self._run.trackers / f"{name}.log").rstrip("."), 80) or f"exit code {code}"
            why = last if code >= 0 else f"{signal.Signals(-code).name} ended its process"
            warn(f"{name} has ended: {why}. The run goes on without it; track --to {name} sends the rest.")

    def let_go(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)  # one that is stopped (SIGSTOP)


def track(run: RunFolder, name: str, *, may_upload: bool = False, waits: bool = False, say: Say) -> None:
    """Send all of a run to a tracker, until the run is over. `waits` for another process at work. Raises UserError."""
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
        _follow(MAKERS[name](about_run(run, may_upload)), say)
    finally:
        os.close(lock)


def about_run(run: RunFolder, may_upload: bool = False) -> AboutRun:
    config = load(run.config)
    settings = public_settings(config.model_dump(mode="json"))
    project, name = config.tracker_project or DEFAULT_PROJECT, config.tracker_run_name or run.name
    return AboutRun(run, project, name, settings, may_upload)


def _follow(tracker: Tracker, say: Say) -> None:
    run, reader = tracker.about.folder, RecordReader(tracker.about, tracker.open)
    last_sign, problems, has_ended = time.monotonic(), set[str](), threading.Event()

    def end_a_hang() -> None:
        # Not once all is sent: the process may be another program's then.
        while not has_ended.wait(min(POLL_S, HANG_S)):
            if not run.is_locked() and time.monotonic() - last_sign > HANG_S:
                say(f"No answer for {HANG_S:.0f} s after the run was over; track sends the rest another time.")
                sys.stdout.flush()
                os._exit(1)

    def send(records: Iterable[StepRecord]) -> None:
        nonlocal last_sign
        for record in records:
            tracker.send(record)
            last_sign = time.monotonic()
        last_sign = time.monotonic()
        try:
            tracker.flush()
        except DiskError as error:
            if (problem := error.faults[0].sentence) not in problems:
                problems.add(problem)
                say(problem)

    threading.Thread(target=end_a_hang, name="tracker's watch", daemon=True).start()
    try:
        tracker.open()
        while run.is_locked():
            send(reader.read())
            time.sleep(POLL_S)
        send(chain(reader.read(), reader.rest()))  # complete, once the lock is free
        tracker.close(reader.ending)
    finally:
        has_ended.set()


def main(arguments: list[str]) -> int:
    """A tracker's process: NAME FOLDER → the exit code. Problems go to its log, and to that of a run that is over."""
    name, run = arguments[0], RunFolder(Path(arguments[1]))

    def tell(sentence: str, in_run: bool = True) -> None:
        with contextlib.suppress(OSError):  # the disk is full
            sys.stdout.write(f"{sentence}\n")
            sys.stdout.flush()
        if in_run:  # in one piece, as every line of that log; it is not created, for the folder may have been moved
            with contextlib.suppress(OSError):
                log = os.open(run.log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
                os.write(log, f"{name}: {sentence}\n".encode(errors="replace"))
                os.close(log)

    def end_with(error: BaseException | None) -> None:
        if isinstance(error, UserError):
            sentences = [str(fault) for fault in error.faults]
        elif error is not None and fault_of(error) is not None:
            sentences = [disk_fault(run.trackers / name, error).faults[0].sentence]
        else:
            with contextlib.suppress(OSError):
                traceback.print_exception(error)
            sentences = [f"{type(error).__name__}: {quote(error, LONGEST)}"]
        for sentence in sentences:  # a run that continues reads it from the end of this process's log
            tell(sentence, not run.is_locked())

    def end_with_thread(what: threading.ExceptHookArgs) -> None:
        # As tensorboardX's writer does on a full disk: sending to it would wait for ever.
        end_with(what.exc_value)
        os._exit(1)

    def pass_on(message: Warning | str, category: type[Warning], *_: Any) -> None:
        # A package's warning to its user: so trackio says that its database cannot be written.
        if category is UserWarning:
            tell(quote(message, LONGEST))

    threading.excepthook, warnings.showwarning = end_with_thread, pass_on
    os.nice(NICE)
    try:
        track(run, name, waits=True, say=tell)
    except Exception as error:  # whatever a package raises
        end_with(error)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
