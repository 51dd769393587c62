"""What all verbs share: exit codes, text that is safe in a terminal, and options.

Text of others stays text in a terminal: a model's answer, a row or the name of a run folder could move its cursor or
change its title otherwise.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from backend.trainer.machine import fault_of_gpu
from backend.utils.disk_faults import fault_of
from backend.utils.environment import require_environment
from backend.utils.errors import UserError
from backend.utils.files import user_path
from backend.utils.text import visible

_NOT_IN_JSON = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What `visible` escapes and JSON does not, and halves of characters, which no terminal or file takes."""


def tell(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print`, with control characters and bidirectional controls escaped, as the window shows them."""
    print(visible(sep.join(map(str, values))), end=end, file=file, flush=flush)


def tell_json(value: Any, *, default: Any = None) -> None:
    """One line of JSON on stdout, the same value for whoever parses it and no commands for a terminal."""
    print(json_line(value, default), flush=True)


def json_line(value: Any, default: Any = None) -> str:
    """JSON on one line with the letters of every script as they are. What a terminal would take for a command is escaped, as JSON has it:
    such characters are in JSON inside texts only."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    return _NOT_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def tell_file(text: str) -> None:
    """The content of a file, on stdout: as it is for another program, as `tell` shows it in a terminal."""
    print(visible(text) if sys.stdout.isatty() else text, end="")


def force_utf8() -> None:
    """Have stdout and stderr escape what their encoding has no place for, where they would raise (half a character, an ellipsis in Latin-1), and
    stdin take bytes that are no text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper) and sys.stdin.errors == "strict":
        sys.stdin.reconfigure(errors="surrogateescape")  # half characters, which sentences name


FINISHED, BUG, MISTAKE, STOPPED = 0, 1, 2, 3


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function a verb: a UserError that it raises, a full disk or too little memory is printed without a traceback, and the process exits with 2."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            require_environment()
            return function(*args, **kwargs)
        except UserError as mistake:
            print_faults(mistake)
            raise typer.Exit(MISTAKE) from None
        except (OSError, RuntimeError, MemoryError) as error:
            # A full or broken disk, met by code that is not ours, and want of memory; everything else may be a bug.
            if (fault := fault_of(error) or fault_of_gpu(error)) is None:
                raise
            print_faults(fault)
            raise typer.Exit(MISTAKE) from None

    return wrapper


def print_faults(mistake: UserError) -> None:
    """One line for each fault, on stderr."""
    for fault in mistake.faults:
        tell(fault, file=sys.stderr)


GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)
"""What a write says when nobody can read it any more. Any other error, as of a full disk behind stdout, is raised."""


class LostTerminal:
    """A text stream that drops what it is given from the moment that its terminal or pipe is gone; every other attribute is the
    stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    def writelines(self, lines: Any) -> None:
        with self._dropping():
            self._stream.writelines(lines)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._point_at_nothing()

    def _point_at_nothing(self) -> None:
        # The descriptor itself: the stream still holds what could not be written, and Python flushes it once more at exit.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ignore_sighup(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a verb one that goes on without its terminal."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = LostTerminal(streams[0]), LostTerminal(streams[1])
        try:
            return function(*args, **kwargs)
        finally:
            sys.stdout.flush()
            sys.stdout, sys.stderr = streams

    return wrapper


def _folder(path: Path | None) -> Path | None:
    """The folder of an option, with ~ expanded. Raises typer's own mistake, because options are read before the verb begins."""
    try:
        return None if path is None else user_path(str(path), "runs_dir")
    except UserError as mistake:
        raise typer.BadParameter(mistake.faults[0].sentence) from None


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
