"""Ask a scoring process: one request at a time, with limits that hold whatever a user's code does.

A process that does not answer in time, ends, or answers anything but what it was asked for is killed with all that it started, and
the next request starts another. Several scorers may share one process (the runs of a sweep): each loads its functions under a key.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from backend.rewards.confinement import END_SIGNAL, confined_environment
from backend.rewards.runner.step_calls import timeout_words
from backend.rewards.sandbox.answers import Untrusted, read_answer
from backend.rewards.sandbox.wire import (
    FIRST_ASYNC,
    FIRST_CALL,
    IDLE,
    LONGEST_ANSWER,
    LOST_CHANNEL,
    PAGE_BYTES,
    SPOILED,
    VERB,
    StatusPage,
    request_bytes,
)
from backend.utils import file_lock
from backend.utils.child_process import module_command
from backend.utils.command import backend_environment
from backend.utils.errors import UserError
from backend.utils.file_lock import is_alive

# The folders in which scoring processes work, in the system's folder of temporary files. One that a killed trainer
# has left goes with the next start.

FOLDER_PREFIX = "grpo-studio-rewards-"
"""After it come the number of the trainer's process, and letters."""


def make_working_folder() -> tuple[Path, int]:
    """A new folder, and the handle that keeps it: it is locked as long as that is open, however this process ends. Raises OSError."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # without locks only the process's number tells that it is in use
        file_lock.take(handle)
    return folder, handle


def remove_abandoned() -> None:
    """Delete this user's folders whose trainers are gone. Neither sign is enough alone: the number may belong to another system that shares the
    folder of temporary files, and a folder is made an instant before it is locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        number = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        with suppress(OSError):
            is_ours = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if is_ours and number.isdecimal() and not is_alive(int(number)) and not file_lock.is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)


# ── process ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# One scoring process, from its start to its end: pipes, working folder, environment, and what it prints.

MOST_OUTPUT = 64 << 10
"""Bytes that are passed on of what is printed during one request: a function that prints without end must not fill the disk."""
_EXIT_POLL_S = 0.005
_GUARD_S = 6.0
"""How long its guard may take to kill what a user's code has started."""
_LAST_WORDS_S = 2.0
"""How long the end waits for the rest of the output: longer than a moment only where something outside its reach holds the pipe."""


class ScoringChild:
    """A process that runs. `requests` and `answers` are our ends of its pipes, neither of which blocks."""

    def __init__(self, network: bool) -> None:
        self.folder, kept = make_working_folder()
        pipes = [os.pipe() for _ in range(3)]
        (its_requests, self.requests), (self.answers, its_answers), (output, its_output) = pipes
        with tempfile.TemporaryFile() as page:
            page.truncate(PAGE_BYTES)
            self.page = StatusPage(page.fileno())
            files = (its_requests, its_answers, page.fileno())
            self._process = self._start(files, its_output, network)
        for file in (its_requests, its_answers, its_output):
            os.close(file)
        os.set_blocking(self.requests, False)
        os.set_blocking(self.answers, False)
        self.output = _Output(output)
        ends = (self._process, self.requests, self.answers, self.output, self.folder, kept)
        self._finalizer = weakref.finalize(self, _end, *ends, 0.0)
        self._ends = ends

    def _start(self, files: tuple[int, ...], output: int, network: bool) -> subprocess.Popen[bytes]:
        command = module_command("backend.rewards.sandbox.server", VERB)
        environment = confined_environment(self.folder, network, backend_environment())
        return subprocess.Popen(
            [*command, *map(str, files), str(int(network))], pass_fds=files, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            cwd=self.folder, env=environment, start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self, within_s: float = 0.0) -> int | None:
        """The exit code, negative for a signal, once it has ended; None where it still runs after `within_s`."""
        deadline = time.monotonic() + within_s
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            time.sleep(_EXIT_POLL_S)
        return code

    def end(self, grace_s: float = 0.0) -> None:
        """Ask it to end by closing its requests; kill it and all that it started after `grace_s`, and remove its folder."""
        if self._finalizer.detach():
            _end(*self._ends, grace_s)


def _end(
    process: subprocess.Popen[bytes],
    requests: int,
    answers: int,
    output: _Output,
    folder: Path,
    kept: int,
    grace_s: float,
) -> None:
    os.close(requests)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(_EXIT_POLL_S)
    process.send_signal(
        END_SIGNAL
    )  # its guard kills all that there is, then itself (`backend.rewards.confinement.guard`)
    try:
        process.wait(_GUARD_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    os.close(answers)
    output.join(_LAST_WORDS_S)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(kept)


class _Output(threading.Thread):
    """Passes on what the process prints, up to `MOST_OUTPUT` bytes of each request."""

    def __init__(self, file: int) -> None:
        super().__init__(name="output of the scoring process", daemon=True)
        self._file = file
        self._passed = self._left_out = 0
        self.start()

    def next_request(self) -> None:
        """What is printed from now on counts anew."""
        self._passed = 0
        self._tell()

    def run(self) -> None:
        with open(self._file, "rb", buffering=0) as stream:
            while piece := stream.read(1 << 16):
                kept = piece[: max(MOST_OUTPUT - self._passed, 0)]
                self._passed += len(kept)
                self._left_out += len(piece) - len(kept)
                if kept:
                    _write(kept.decode(errors="replace"))
        self._tell()

    def _tell(self) -> None:
        left_out, self._left_out = self._left_out, 0
        if left_out:
            _write(f"\n[{left_out:,} more bytes that reward functions printed are left out]\n")


def _write(text: str) -> None:
    with suppress(Exception):  # a terminal that is gone, or a full disk, is no reason to stop reading
        sys.stderr.write(text)
        sys.stderr.flush()


# ── process ──────────────────────────────────────────────────────────────────────────────────────────────────────────

POLL_S = 0.05
"""How often a waiting parent looks at the shared page and calls `poll`."""
START_S = 60.0
"""How long our own code may take in the process: to start Python, to import, to read a request. On a busy machine, seconds."""
SILENT = f"gave no answer for {START_S:.0f} s and more, as if its process had been stopped"
"""The words for a process that does nothing, outside any call."""
ASYNC_GRACE_S = 0.2
"""How long after their limit async calls may take to be cancelled by their own loop, which knows which of them was late."""
EXIT_S = 1.0
"""How long a process may take to end by itself at the end of a run: a user's `atexit` may write a file."""
_EXIT_CODE_S = 0.5
"""How long after the end of its answers a process may take to exit; one that still runs then has closed the pipe."""

_SIGNALS = {
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGBUS: "a bus error",
    signal.SIGABRT: "an abort",
    signal.SIGKILL: "killed, by itself or by the system when memory runs out",
    signal.SIGXCPU: "out of processor time",
    signal.SIGILL: "an illegal instruction",
    signal.SIGFPE: "a floating-point exception",
}


class ChildFailed(Exception):
    """The process gave no answer, and is gone. `what` are the words after the name of what it was at, which `mark` says."""

    def __init__(self, what: str, mark: int) -> None:
        super().__init__(what)
        self.what, self.mark = what, mark

    def function(self, count: int) -> int:
        """The index of the function that it was at, among `count`; the first where it is not known."""
        index = self.mark - (FIRST_ASYNC if self.mark >= FIRST_ASYNC else FIRST_CALL)
        return index if 0 <= index < count else 0


class ScoringProcess:
    """Where user code is scored. `generation` counts the processes that there were: functions that were loaded into an earlier one
    are gone."""

    def __init__(self, network: bool = False) -> None:
        """`network`: whether its functions may use it (`reward_network`)."""
        self.network = network
        self.generation = 0
        self.lock = threading.RLock()
        """Held over a request and what belongs to it."""
        self._child: ScoringChild | None = None
        self._number = 0
        self._keys = 0
        self._in_use: set[int] = set()

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        return self._child.pid if self._child else None

    def new_key(self) -> int:
        """A key that no other scorer of this process has."""
        self._keys += 1
        return self._keys

    def hold(self, key: int) -> None:
        """The scorer of this key uses the process, until `release`."""
        self._in_use.add(key)

    def start(self) -> None:
        """Start a process if there is none, without waiting for it. Raises UserError."""
        with self.lock:
            if self._child is None:
                try:
                    self._child = ScoringChild(self.network)
                except OSError as error:
                    sentence = f"The process of the reward functions cannot be started: {error.strerror or error}."
                    raise UserError("reward_isolation", sentence) from error
                self.generation += 1

    def request(
        self, request: dict[str, Any], limit_s: float, calls: int = 1, poll: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Send a request and wait for its answer, which is still unchecked but for its number. `limit_s`: of each of `calls` calls. `poll`
        may raise to give up. Raises ChildFailed, what `poll` raises, and UserError for a column that cannot be sent; the process is
        gone then."""
        with self.lock:
            self.start()
            self._number += 1
            try:
                self._send({**request, "id": self._number})
                return read_answer(self._receive(limit_s, calls, poll), self._number)
            except Untrusted:
                self.reject()
            except BaseException:
                # The answer to this request must not be taken for that to the next one.
                self.stop()
                raise

    def reject(self) -> NoReturn:
        """The last answer was not what was asked for: end the process. Raises ChildFailed."""
        mark = self._child.page.mark if self._child else IDLE
        self.stop()
        raise ChildFailed("wrote something of its own into the pipe by which scores are returned", mark)

    def stop(self, grace_s: float = 0.0) -> None:
        """End the process and all that it has started, if there is one."""
        with self.lock:
            child, self._child = self._child, None
            if child is not None:
                child.end(grace_s)

    def release(self, key: int, grace_s: float = 0.0) -> None:
        """The scorer of this key is done; with the last one the process ends."""
        with self.lock:
            self._in_use.discard(key)
            if not self._in_use:
                self.stop(grace_s)

    # ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, request: dict[str, Any]) -> None:
        child = self._child
        assert child is not None
        if _ready(child.answers, selectors.EVENT_READ, 0.0) and child.exit_code() is None:
            raise Untrusted  # something that nobody asked for
        child.output.next_request()
        try:
            rest = memoryview(request_bytes(request))
        except Exception as error:  # whatever the type of an object in the row raises
            sentence = f"A column holds what cannot be handed to reward functions: {type(error).__name__}."
            raise UserError("data", sentence) from error
        deadline = time.monotonic() + START_S
        try:
            while rest:
                if _ready(child.requests, selectors.EVENT_WRITE, POLL_S):
                    rest = rest[os.write(child.requests, rest) :]
                elif time.monotonic() > deadline:
                    raise ChildFailed("kept its process from reading the next completions", IDLE)
        except BrokenPipeError:
            pass  # receiving finds how the process has ended

    def _receive(self, limit_s: float, calls: int, poll: Callable[[], None]) -> bytes:
        child = self._child
        assert child is not None
        received, watch = bytearray(), _Watch(limit_s, calls)
        while not received.endswith(b"\n"):
            poll()
            if _ready(child.answers, selectors.EVENT_READ, watch.patience()):
                piece = os.read(child.answers, 1 << 20)
                if not piece:
                    raise self._ended(child)
                received += piece
                if b"\n" in piece[:-1]:
                    raise Untrusted
                if len(received) > LONGEST_ANSWER:
                    raise ChildFailed(f"returned more than {LONGEST_ANSWER >> 20} MB", child.page.mark)
            elif child.exit_code() is not None:  # a process that it has started may hold the pipe open
                raise self._ended(child)
            else:
                watch.look(child.page.mark)
        return bytes(received)

    def _ended(self, child: ScoringChild) -> ChildFailed:
        code, mark = child.exit_code(_EXIT_CODE_S), child.page.mark
        if code is None or code == LOST_CHANNEL:
            return ChildFailed("closed or replaced the pipe by which scores are returned", mark)
        if code == SPOILED:
            return ChildFailed("left Python in a state in which its process could not go on", mark)
        return ChildFailed(f"ended the process it ran in ({describe_exit(code)})", mark)


class _Watch:
    """Follows the mark of the shared page. A user's code could write it too, so beyond the limit of each call there is one of all
    `calls` together."""

    def __init__(self, limit_s: float, calls: int) -> None:
        self._limit_s = limit_s
        self._mark = IDLE
        self._since = time.monotonic()
        self._end = self._since + START_S + (limit_s + ASYNC_GRACE_S) * calls

    @property
    def _deadline(self) -> float:
        """When the time for what the process is at is up."""
        if self._mark == IDLE:
            limit_s = max(START_S, self._limit_s)
        else:
            limit_s = self._limit_s + (ASYNC_GRACE_S if self._mark >= FIRST_ASYNC else 0.0)
        return min(self._since + limit_s, self._end)

    def patience(self) -> float:
        """Seconds until the next look: no limit is overstepped by more than a moment."""
        return max(min(POLL_S, self._deadline - time.monotonic()), 0.001)

    def look(self, mark: int) -> None:
        """Raises ChildFailed once a limit is over."""
        # The limits of calls that are awaited together begin together; what follows them is the text of one's exception.
        if mark != self._mark and (self._mark < FIRST_ASYNC or mark == IDLE):
            self._since = time.monotonic()
        self._mark = mark
        if time.monotonic() >= self._deadline:
            raise ChildFailed(SILENT if mark == IDLE else timeout_words(self._limit_s), mark)


def describe_exit(code: int) -> str:
    """`exit code 3`, or `signal 11, a segmentation fault` for the negative code of a signal."""
    if code >= 0:
        return f"exit code {code}"
    known = next((words for number, words in _SIGNALS.items() if number == -code), "")
    return f"signal {-code}{f', {known}' if known else ''}"


def _ready(file: int, event: int, wait_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(file, event)
        return bool(selector.select(wait_s))
