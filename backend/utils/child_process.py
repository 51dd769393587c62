"""Child processes that answer requests: one JSON value a line on stdin, one a line on stdout.

The parent holds a `ChildProcess`, starts it with the first request, keeps it warm and starts another where one died. A
request has at most one answer, and the next one is sent only after it. The child ends when its stdin does.

In the child, `claim_stdout` keeps the pipe for answers: neither a `print` in a user's code nor a C library can put a
line between them. The window's side of `backend.serve` is a QProcess (`app.state.processes`).
"""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from backend.utils.command import backend_command, backend_environment, is_bundled
from backend.utils.files import json_safe, write_all

POLL_S = 0.05
STDERR_TAIL = 2000  # bytes of a child's stderr that are kept for the message of its end
LAST_WORDS_S = 2.0  # seconds to wait for the rest of its stderr, which a process that it started may keep open
CHILD_VERB = "child"  # hidden verb of a bundled app, which has no Python to run a module with


def claim_stdout() -> TextIO:
    """Keep stdout for answers, and return it; from now on prints of Python and of C code go to stderr."""
    sys.stdout.flush()
    # Descriptors, not only sys.stdout: C libraries and grandchildren write to descriptor 1 itself.
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    # A lone surrogate, as broken text may hold, has no UTF-8; it becomes "?".
    return os.fdopen(answers, "w", encoding="utf-8", errors="replace")


def requests() -> Iterator[Any]:
    """The parent's requests, until it closes our stdin."""
    for line in sys.stdin.buffer:
        yield json.loads(line)


def answer(out: TextIO, message: Any) -> None:
    """Write one answer to the stream that `claim_stdout` returned."""
    out.write(json_line(message, default=str))
    out.flush()


def json_line(message: Any, default: Callable[[Any], Any] | None = None) -> str:
    """`message` as one line. NaN and infinities become null; `default` converts values that JSON cannot hold."""
    return json.dumps(json_safe(message), ensure_ascii=False, allow_nan=False, default=default) + "\n"


class ChildEnded(Exception):
    """The child ended before it answered. `exit_code` is negative for a signal; `stderr` is the end of its stderr."""

    def __init__(self, exit_code: int, stderr: str = "") -> None:
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        super().__init__(f"the process ended with {how}" + (f":\n{stderr}" if stderr else ""))
        self.exit_code, self.stderr = exit_code, stderr


class ChildTimeout(Exception):
    """The child did not answer in time, and was killed."""


def module_command(module: str) -> list[str]:
    """Command that runs one of our modules, which has a `main(arguments)` (`-P`: see `backend_command`)."""
    if is_bundled():
        return backend_command(CHILD_VERB, module)
    return [sys.executable, "-P", "-m", module]


def start_beside(command: Sequence[str], folder: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process of ours in a session of its own, which neither Ctrl-C in this terminal nor our end reaches."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=backend_environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


class ChildProcess:
    """A child in a session of its own, which answers one request at a time; callers that share it hold a lock. `stop`
    waits `grace_s` before it kills. Lines that do not begin with `marker` are passed over."""

    def __init__(
        self, command: Sequence[str], *, grace_s: float, environment: Mapping[str, str] | None = None, marker: str = ""
    ) -> None:
        self.command, self.grace_s, self._marker = list(command), grace_s, marker.encode()
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = StderrTail()
        self._received = b""

    @property
    def pid(self) -> int | None:
        """Process id; None while no child was started, or after it was stopped. The child may have died since."""
        return self._process.pid if self._process else None

    def request(self, message: Any, timeout_s: float | None = None, poll: Callable[[], None] = lambda: None) -> Any:
        """Send `message`, to a new child if there is none, and wait for the answer. `poll` is called every `POLL_S` and
        may raise to give up. After that, ChildEnded and ChildTimeout the child is gone."""
        self.start()
        assert self._process is not None
        stdin: Any = self._process.stdin
        try:
            with suppress(BrokenPipeError):  # reading the answer finds that the child has ended, and how
                write_all(stdin, json_line(message, default=str).encode(errors="replace"))
        except BaseException:
            self.stop()
            raise
        return self.receive(timeout_s, poll)

    def receive(self, timeout_s: float | None = None, poll: Callable[[], None] = lambda: None) -> Any:
        """Wait for a line of the child, which may be unasked, such as a greeting. Raises as `request` does."""
        assert self._process is not None and self._process.stdout is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                while True:
                    while b"\n" in self._received:
                        line, _, self._received = self._received.partition(b"\n")
                        if line.startswith(self._marker):
                            return json.loads(line.removeprefix(self._marker))
                    poll()
                    if deadline is not None and time.monotonic() > deadline:
                        raise ChildTimeout
                    # Short waits even without a `poll`: an exception that another thread raises in this one arrives
                    # only between calls into C.
                    if selector.select(POLL_S):
                        piece = self._process.stdout.read(1 << 16)
                        if not piece:
                            raise ChildEnded(self.stop(), self._stderr.text())
                        self._received += piece
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Start a child unless there is one."""
        if self._process is not None:
            return
        # Without buffers of Python's: a stopped child must leave nothing that closing the pipe would flush into it.
        self._process = subprocess.Popen(
            self.command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=backend_environment() if self._environment is None else self._environment,
            start_new_session=True,  # so that Ctrl-C does not reach the child
        )
        self._received, self._stderr = b"", StderrTail(self._process.stderr)

    def stop(self) -> int:
        """Close the child's stdin, kill it after `grace_s`, and return its exit code; 0 where there was no child."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.close()  # `requests` ends in the child
        try:
            process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()
        return process.wait()


class StderrTail:
    """Reads a child's stderr as long as it lives, so that it never blocks on it; keeps the last `STDERR_TAIL` bytes."""

    def __init__(self, stream: IO[bytes] | None = None) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._drain, args=(stream,), name="stderr of a child", daemon=True)
        if stream is not None:
            self._thread.start()

    def text(self) -> str:
        """The last bytes that a child wrote before it ended."""
        if self._thread.is_alive():
            self._thread.join(LAST_WORDS_S)
        return self._tail.decode(errors="replace").strip()

    def _drain(self, stream: IO[bytes]) -> None:
        with stream:
            while piece := stream.read(1 << 16):
                self._tail = (self._tail + piece)[-STDERR_TAIL:]
