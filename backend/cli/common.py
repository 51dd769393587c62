"""Shared by all verbs: exit codes, terminal-safe printing, a run's log.txt, and common options."""

import errno
import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import typer

from backend.runs.run_folder import RunFolder
from backend.trainer.control import handlers_restored, on_stop_signals
from backend.trainer.machine import fault_of_gpu
from backend.utils.disk import fault_of, writing
from backend.utils.errors import UserError, log_traceback
from backend.utils.files import append_regular, require_plain_files, user_path, write_all
from backend.utils.hub_cache import require_hub_address
from backend.utils.text import visible

IS_LOG_VARIABLE = "GRPO_STUDIO_STDOUT_IS_LOG"  # set when the process that reads stdout writes log.txt
FINISHED, BUG, USER_ERROR, STOPPED = 0, 1, 2, 3
GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)  # of writes to a closed terminal or pipe
_NOT_IN_JSON = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that `visible` escapes and JSON does not, and lone surrogates."""


def tell(value: object = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print` with control and bidirectional characters escaped."""
    print(visible(str(value)), end=end, file=file, flush=flush)


def tell_error(text: object) -> None:
    tell(text, file=sys.stderr, flush=True)


def tell_json(value: Any, *, default: Any = None) -> None:
    """Print one line of JSON: Unicode letters unchanged, terminal control characters escaped."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    print(_NOT_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)


def tell_file(text: str) -> None:
    """Print file content on stdout: escaped in a terminal, unchanged in a pipe."""
    print(visible(text) if sys.stdout.isatty() else text, end="")


def prepare_streams() -> None:
    """Open /dev/null as the standard streams that are closed: the next files would take their descriptors. Make stdout
    and stderr escape characters that they cannot encode, and stdin accept invalid UTF-8."""
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
            require_hub_address()
            return function(*args, **kwargs)
        except (typer.Abort, KeyboardInterrupt) as end:  # "no" to a question, or Ctrl-C
            tell_error("Nothing was done." if isinstance(end, typer.Abort) else "Stopped.")
            raise typer.Exit(STOPPED) from None
        except (UserError, OSError, RuntimeError, MemoryError) as error:
            # A full or broken disk, met by code that is not ours, and want of memory; everything else may be a bug.
            problem = error if isinstance(error, UserError) else fault_of(error) or fault_of_gpu(error)
            if problem is None:
                raise
            print_problems(problem)
            raise typer.Exit(USER_ERROR) from None

    return wrapper


@contextmanager
def stoppable(sentence: str, say: Callable[[object], None] = tell_error) -> Iterator[None]:
    """Exit with STOPPED at the first stop signal, with a message that may name it as {stop}, out of work whose files
    are always complete; later signals are ignored. Import C modules before: many drop exceptions while initialising."""

    def stop(number: int, frame: FrameType | None) -> None:
        on_stop_signals(signal.SIG_IGN)
        raise KeyboardInterrupt(f"{signal.Signals(number).name} was received")

    try:
        with handlers_restored():
            on_stop_signals(stop)
            yield
    except KeyboardInterrupt as stopped:
        say(sentence.format(stop=stopped))
        raise typer.Exit(STOPPED) from None


def print_problems(error: UserError) -> None:
    log_traceback(error.traceback)
    for problem in error.faults:
        tell(problem, file=sys.stderr)


class LastingStream:
    """A text stream that outlives its terminal or pipe. With `write_to_log`, which writes to a run's log.txt too, any
    error of the stream ends its use; without, only that the terminal or pipe has closed. `is_log`: the stream leads to
    log.txt itself, and is not used."""

    def __init__(self, stream: Any, write_to_log: Callable[[str], None] | None = None, *, is_log: bool = False) -> None:
        self._stream, self._is_open, self._has_log = stream, not is_log, write_to_log is not None
        if write_to_log is not None:
            self.write_to_log = write_to_log  # also for tracebacks, of which a terminal gets the sentence alone

    def write(self, text: str) -> int:
        if self._has_log:
            self.write_to_log(text)
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
            if not self._has_log and error.errno not in GONE:
                raise
            self._is_open = False
            with suppress(OSError, ValueError):  # flushing a broken stdout at exit would end Python with 120
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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


@contextmanager
def logging_to(folder: RunFolder) -> Iterator[Callable[[str], None]]:
    """Copy stdout and stderr to log.txt, or only write there if stdout is that file. Yields its writer, which never
    raises: the event log is on the same disk. Raises DiskError, and UserError for links or pipes in the folder."""
    is_log, streams = stdout_is_log(folder), (sys.stdout, sys.stderr)
    require_plain_files(folder.path)  # this is the first file of a run that is written, before its lock is held
    with writing(folder.log):
        file = append_regular(folder.log)

    def write(text: str) -> None:
        with suppress(OSError):
            write_all(file, text.encode(errors="backslashreplace"))

    sys.stdout, sys.stderr = (LastingStream(stream, write, is_log=is_log) for stream in streams)
    try:
        yield write
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams
        file.close()


def stdout_is_log(folder: RunFolder) -> bool:
    """True if stdout goes to log.txt, as when the window started this process or its launcher."""
    if os.environ.get(IS_LOG_VARIABLE):
        return True
    try:
        return folder.log.exists() and os.path.samestat(os.fstat(sys.stdout.fileno()), folder.log.stat())
    except (OSError, ValueError):
        return False


def _folder(path: Path | None) -> Path | None:
    """A folder option as an absolute path, since children have another working directory. Raises typer's BadParameter,
    as options are parsed before the verb starts."""
    try:
        return None if path is None else user_path(str(path), "runs_dir").absolute()
    except UserError as error:
        raise typer.BadParameter(error.faults[0].sentence) from None


AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]
RunsDir = Annotated[Path | None, typer.Option("--runs-dir", callback=_folder, help="The folder of runs.")]
Hosts = Annotated[
    str | None,
    typer.Option("--hosts", metavar="FILE", help="Train on the machines of this hosts file; none is this one alone."),
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run reward files of this run that were never allowed on this machine.")
]
Stream = Annotated[bool, typer.Option("--stream", help="Repeat the event log on stdout, one JSON object a line.")]
Live = Annotated[bool | None, typer.Option("--progress/--no-progress", help="A live display (default on a terminal).")]
