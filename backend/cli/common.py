"""Shared by all verbs: exit codes, terminal-safe printing, and common options."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from backend.trainer.machine import fault_of_gpu
from backend.utils.disk import fault_of
from backend.utils.errors import UserError, log_traceback
from backend.utils.files import user_path
from backend.utils.machine import require_environment
from backend.utils.text import visible

if TYPE_CHECKING:
    from backend.cli.run_log import RunLog

FINISHED, BUG, USER_ERROR, STOPPED = 0, 1, 2, 3
GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)  # of writes to a closed terminal or pipe
_NOT_IN_JSON = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that `visible` escapes and JSON does not, and lone surrogates."""


def tell(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print` with control and bidirectional characters escaped."""
    print(visible(sep.join(map(str, values))), end=end, file=file, flush=flush)


def tell_error(text: object) -> None:
    tell(text, file=sys.stderr, flush=True)


def tell_json(value: Any, *, default: Any = None) -> None:
    """Print one terminal-safe line of JSON."""
    print(json_line(value, default), flush=True)


def json_line(value: Any, default: Any = None) -> str:
    """One line of JSON: Unicode letters unchanged, terminal control characters escaped."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    return _NOT_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def tell_file(text: str) -> None:
    """Print file content on stdout: escaped in a terminal, unchanged in a pipe."""
    print(visible(text) if sys.stdout.isatty() else text, end="")


def prepare_streams() -> None:
    """Open /dev/null as the standard streams that are closed, else the next files would take their descriptors: mlx
    reads none as 0, and others would get what is printed. Make stdout and stderr escape characters that they cannot
    encode, and stdin accept invalid UTF-8."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper) and sys.stdin.errors == "strict":
        sys.stdin.reconfigure(errors="surrogateescape")  # half characters, which sentences name


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a verb: prints a UserError, a full disk or low memory without a traceback and exits with 2."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            require_environment()
            return function(*args, **kwargs)
        except (UserError, OSError, RuntimeError, MemoryError) as error:
            # A full or broken disk, met by code that is not ours, and want of memory; everything else may be a bug.
            problem = error if isinstance(error, UserError) else fault_of(error) or fault_of_gpu(error)
            if problem is None:
                raise
            print_problems(problem)
            raise typer.Exit(USER_ERROR) from None

    return wrapper


def print_problems(error: UserError) -> None:
    log_traceback(error.traceback)
    for problem in error.faults:
        tell(problem, file=sys.stderr)


class LastingStream:
    """A text stream that outlives its terminal or pipe, and may write to a run's log.txt too.

    With a `log` any error of the stream ends its use; without one, only that the terminal or pipe has closed.
    `is_log`: the stream leads to log.txt itself, and is not used.
    """

    def __init__(self, stream: Any, log: RunLog | None = None, *, is_log: bool = False) -> None:
        self._stream, self._log = stream, log
        self._is_open = not is_log
        if log is not None:
            self.write_to_log = log.write  # for tracebacks, of which a terminal gets the sentence alone

    def write(self, text: str) -> int:
        if self._log is not None:
            self._log.write(text)
        self._use("write", text)
        return len(text)

    def flush(self) -> None:
        self._use("flush")

    def _use(self, method: str, *arguments: str) -> None:
        if not self._is_open:
            return
        try:
            getattr(self._stream, method)(*arguments)
        except OSError as error:
            if self._log is None and error.errno not in GONE:
                raise
            self._is_open = False
            give_up(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def give_up(stream: Any) -> None:
    """Redirect a stream to nowhere: flushing a broken stdout at exit would end Python with 120."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def ignore_sighup(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the verb survive the closing of its terminal."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = map(LastingStream, streams)
        try:
            return function(*args, **kwargs)
        finally:
            sys.stdout.flush()
            sys.stdout, sys.stderr = streams

    return wrapper


def say(text: str, stream: Any) -> None:
    """`tell` on a stream that may be gone."""
    try:
        tell(text, file=stream, flush=True)
    except OSError:
        give_up(stream)


def _folder(path: Path | None) -> Path | None:
    """Expand ~ in a folder option. Raises typer's BadParameter, since options are parsed before the verb starts."""
    try:
        return None if path is None else user_path(str(path), "runs_dir")
    except UserError as error:
        raise typer.BadParameter(error.faults[0].sentence) from None


AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]
ExistingRunsDir = Annotated[Path | None, typer.Option("--runs-dir", callback=_folder, help="Where run folders are.")]
NewRunsDir = Annotated[Path | None, typer.Option("--runs-dir", callback=_folder, help="Where run folders go.")]
Hosts = Annotated[
    str | None,
    typer.Option("--hosts", metavar="FILE", help="Train on the machines of this hosts file; none is this one alone."),
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run reward files of this run that were never allowed on this machine.")
]
Stream = Annotated[bool, typer.Option("--stream", help="Repeat the event log on stdout, one JSON object a line.")]
Live = Annotated[bool | None, typer.Option("--progress/--no-progress", help="A live display (default on a terminal).")]
