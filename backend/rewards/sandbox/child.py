"""One scoring process, from its start to its end: pipes, working folder, environment, and what it prints.

What it starts ends with it (`backend.confinement.guard`), and Ctrl-C in the terminal is for the trainer alone. It has neither our
environment nor our working directory, and can write in its own folder only, where the system offers that. Its standard input is empty;
what it writes to standard output and error goes to our standard error, and so into log.txt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

from backend.child_process import module_command
from backend.confinement import END_SIGNAL, confined_environment
from backend.rewards.sandbox.wire import PAGE_BYTES, VERB, StatusPage
from backend.rewards.sandbox.working_folders import make_working_folder
from backend.spec.command import backend_environment

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
    process.send_signal(END_SIGNAL)  # its guard kills all that there is, then itself (`backend.confinement.guard`)
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
