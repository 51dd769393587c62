"""What a training process prints: on its terminal and in log.txt, neither of which may break the other.

A terminal that is closed, or a pipe that nobody reads any more, ends no run. A log that cannot be written does, with a sentence, as every file of
a run does; but not in the middle of whatever has just printed something: the fault is raised where the event log's events are shown.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from io import RawIOBase
from typing import Any

from backend.cli.output import tell
from backend.runs.events import write_all
from backend.runs.run_folder import RunFolder
from backend.utils.disk_faults import DiskError, writing
from backend.utils.regular_file import append_regular, require_plain_files

IS_LOG_VARIABLE = "GRPO_STUDIO_STDOUT_IS_LOG"
"""Environment variable of a process whose stdout is a pipe to somebody who writes it to log.txt."""


class RunLog:
    """log.txt, appended to without a buffer: Python's would keep what failed, and fail again as the process ends."""

    def __init__(self, run: RunFolder) -> None:
        """Raises DiskError, and UserError for a folder that holds links or pipes."""
        require_plain_files(run.path)  # this is the first file of a run that is written, before its lock is held
        self._path = run.log
        self._fault: DiskError | None = None
        with writing(run.log):
            self._file: RawIOBase = append_regular(run.log)

    def write(self, text: str) -> None:
        """Never raises: the first fault is kept for `checked`."""
        try:
            with writing(self._path):
                write_all(self._file, text.encode(errors="backslashreplace"))
        except DiskError as fault:
            self._fault = self._fault or fault

    def checked(self, show: Callable[[Any], None]) -> Callable[[Any], None]:
        """`show` for an event of the event log, which then raises the fault of this log, once."""
        is_told = False

        def show_and_check(event: Any) -> None:
            nonlocal is_told
            show(event)
            if self._fault is not None and not is_told:
                is_told = True
                raise self._fault

        return show_and_check

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class Tee:
    """A text stream that writes to the terminal and to log.txt; every other attribute is the terminal's."""

    def __init__(self, terminal: Any, log: RunLog, *, is_log: bool = False) -> None:
        """`is_log`: what is written to the terminal is in log.txt already."""
        self._terminal, self._log = terminal, log
        self._has_terminal = terminal is not None and not is_log

    def write(self, text: str) -> int:
        self._log.write(text)
        self._tell(lambda: self._terminal.write(text))
        return len(text)

    def write_to_log(self, text: str) -> None:
        """Write to log.txt, not to the terminal."""
        self._log.write(text)

    def flush(self) -> None:
        self._tell(lambda: self._terminal.flush())

    def _tell(self, work: Callable[[], Any]) -> None:
        """Do something with the terminal, and give it up where it fails."""
        if not self._has_terminal:
            return
        try:
            work()
        except OSError:
            self._has_terminal = False
            give_up(self._terminal)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


def give_up(stream: Any) -> None:
    """Send what a stream still holds, and whatever is printed to it later, nowhere: Python flushes it as the process ends, and would exit
    with 120 where that fails."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(text: str, stream: Any) -> None:
    """Print a line for whoever is still there to read it."""
    try:
        tell(text, file=stream, flush=True)
    except OSError:
        give_up(stream)


@contextlib.contextmanager
def logging_to(folder: RunFolder) -> Generator[RunLog]:
    """Copy stdout and stderr to log.txt; where stdout is that file already, as the window starts a trainer, write to it alone. Raises
    DiskError where it cannot be opened."""
    is_log = stdout_is_log(folder)
    streams = sys.stdout, sys.stderr
    log = RunLog(folder)
    sys.stdout, sys.stderr = Tee(streams[0], log, is_log=is_log), Tee(streams[1], log, is_log=is_log)
    try:
        yield log
    finally:
        for tee in (sys.stdout, sys.stderr):
            tee.flush()
        sys.stdout, sys.stderr = streams
        log.close()


def stdout_is_log(folder: RunFolder) -> bool:
    """Whether what is printed goes to log.txt, as where the window has started this process or the launcher of it."""
    if os.environ.get(IS_LOG_VARIABLE):
        return True
    try:
        return folder.log.exists() and os.path.samestat(os.fstat(sys.stdout.fileno()), folder.log.stat())
    except (OSError, ValueError, AttributeError):
        return False
