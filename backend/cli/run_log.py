"""log.txt of a run: what its process prints, beside the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from typing import Any

from backend.cli.common import LastingStream
from backend.runs.run_folder import RunFolder
from backend.utils.disk import DiskError, writing
from backend.utils.files import append_regular, require_plain_files, write_all

IS_LOG_VARIABLE = "GRPO_STUDIO_STDOUT_IS_LOG"  # set when the process that reads stdout writes log.txt


class RunLog:
    """log.txt, appended without a buffer, which would fail again at exit after a failed write."""

    def __init__(self, run: RunFolder) -> None:
        """Raises DiskError, and UserError for a folder with links or pipes."""
        require_plain_files(run.path)  # this is the first file of a run that is written, before its lock is held
        self._path, self._error, self._error_was_raised = run.log, None, False
        with writing(run.log):
            self._file: RawIOBase = append_regular(run.log)

    def write(self, text: str) -> None:
        """Never raises: `checked` reports the first error."""
        try:
            with writing(self._path):
                write_all(self._file, text.encode(errors="backslashreplace"))
        except DiskError as error:
            self._error: DiskError | None = self._error or error

    def checked(self, show: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap `show` so that it raises the first write error of this log once."""

        def show_and_check(event: Any) -> None:
            show(event)
            if self._error is not None and not self._error_was_raised:
                self._error_was_raised = True
                raise self._error

        return show_and_check

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


@contextmanager
def logging_to(folder: RunFolder) -> Iterator[RunLog]:
    """Copy stdout and stderr to log.txt, or write only there if stdout is that file. Raises DiskError."""
    is_log = stdout_is_log(folder)
    streams = sys.stdout, sys.stderr
    log = RunLog(folder)
    sys.stdout, sys.stderr = (LastingStream(stream, log, is_log=is_log) for stream in streams)
    try:
        yield log
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams
        log.close()


def stdout_is_log(folder: RunFolder) -> bool:
    """True if stdout goes to log.txt, as when the window started this process or its launcher."""
    if os.environ.get(IS_LOG_VARIABLE):
        return True
    try:
        return folder.log.exists() and os.path.samestat(os.fstat(sys.stdout.fileno()), folder.log.stat())
    except (OSError, ValueError):
        return False
