"""The process that runs programs: one fork for each, several at a time, none for longer than it may. Its parent is
`backend.rewards.programs.client`.

First it says {"confined": why programs are not, or ""}. Then, for each request
    {"programs": [tasks of one program, in order], "seconds", "memory_mb", "deadline_s", "parallel"}
it answers {"programs": [[{"ended": "exit" | "time" | "output" | "limit", "code", "output"}]]}, one entry for each task that was run. A task:
    {"source": Python, "input": text}                                 judged by what it writes to standard output
    {"source": Python, "setup": Python, "tests": [Python]}            judged by what it reports (`backend.rewards.programs.program`)
The tasks of a program run one after the other, and end with the first that ran out of time or wrote too much; one program after another
has `seconds` of processor time for each task and twice as long on the clock for all. "limit": `deadline_s` of the whole request are over.

It has one thread, so that a fork is whole, and imports nothing that a program should not have.
"""

from __future__ import annotations

import bisect
import collections
import functools
import heapq
import itertools
import math
import os
import random
import re
import select
import shutil
import signal
import string
import sys
import tempfile
import time
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.rewards.confinement import confine_program, readable_by_programs
from backend.rewards.programs.program import REPORTS, ProgramLimits, become_program
from backend.rewards.sandbox.process import make_working_folder
from backend.utils import child_process

PRELOADED = (bisect, collections, functools, heapq, itertools, math, random, re, string, typing)
"""What most programs import: loaded once, before they are forked."""
MOST_OUTPUT = 256 << 10
"""Bytes that one task may write, or report."""
MOST_FOLDER = 16 << 20
"""Bytes that a program may keep in its folder."""
POLL_S = 0.02
FOLDER_POLL_S = 0.2


@dataclass(slots=True)
class RunningTask:
    """A fork that runs. `output` is our end of its pipe; `until` and `looked` are monotonic times."""

    pid: int
    program: int
    output: int
    folder: Path
    until: float
    looked: float
    read: bytearray = field(default_factory=bytearray)
    ended: str = ""
    """Why it was killed; "" while it was not."""
    code: int | None = None
    """Its exit code, negative for a signal; None while it runs."""

    def has_ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None


@dataclass(slots=True)
class ProgramBatch:
    """The programs of one request: `left` tasks of each, and the results so far."""

    left: list[list[Mapping[str, Any]]]
    limits: ProgramLimits
    parallel: int
    deadline: float
    results: list[list[dict[str, Any]]]
    until: list[float | None]
    """When the time of each program is up; None where it has not begun."""

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> ProgramBatch:
        programs = request["programs"]
        return cls(
            [list(tasks) for tasks in programs],
            ProgramLimits(request["seconds"], request["memory_mb"]),
            request["parallel"],
            time.monotonic() + request["deadline_s"],
            [[] for _ in programs],
            [None] * len(programs),
        )


class ProgramServer:
    """Runs batches. `folder`: where programs work, each in a folder of its own below it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._running: dict[int, RunningTask] = {}

    def run(self, batch: ProgramBatch) -> list[list[dict[str, Any]]]:
        """Raises EOFError where the parent has gone; no fork is left then."""
        waiting = collections.deque(index for index, tasks in enumerate(batch.left) if tasks)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < batch.parallel and time.monotonic() < batch.deadline:
                    self._start(waiting.popleft(), batch)
                if time.monotonic() >= batch.deadline:
                    waiting.clear()
                for task in self._advance(batch):
                    self._finish(task, batch)
                    if batch.left[task.program] and task.ended == "":
                        waiting.appendleft(task.program)
        finally:
            for task in self._running.values():
                _kill(task.pid)
        return batch.results

    def _start(self, program: int, batch: ProgramBatch) -> None:
        task = batch.left[program].pop(0)
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        ours, theirs = os.pipe()
        now = time.monotonic()
        until = batch.until[program] = batch.until[program] or now + 2 * batch.limits.seconds
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                _take_places(task, theirs, server)
                become_program(task, folder, batch.limits)
            os._exit(1)
        os.close(theirs)
        os.set_blocking(ours, False)
        with suppress(OSError):  # the fork does the same: whoever is first
            os.setpgid(pid, pid)
        self._running[ours] = RunningTask(pid, program, ours, folder, min(until, batch.deadline), now)

    def _advance(self, batch: ProgramBatch) -> list[RunningTask]:
        """Wait a moment, read what there is, and kill what has gone too far. → the tasks that have ended."""
        readable, _, _ = select.select([0, *self._running], [], [], POLL_S)
        if 0 in readable:  # nothing is sent before the answer, so it is the end of the requests
            raise EOFError
        for output in readable:
            self._read(self._running[output])
        now = time.monotonic()
        for task in self._running.values():
            self._check(task, batch, now)
        return [task for task in list(self._running.values()) if task.has_ended()]

    def _read(self, task: RunningTask) -> None:
        with suppress(BlockingIOError):
            while len(task.read) <= MOST_OUTPUT and (piece := os.read(task.output, 1 << 16)):
                task.read += piece

    def _check(self, task: RunningTask, batch: ProgramBatch, now: float) -> None:
        why = ""
        if len(task.read) > MOST_OUTPUT:
            why = "output"
        elif now >= task.until:
            why = "limit" if task.until >= batch.deadline else "time"
        elif now - task.looked > FOLDER_POLL_S:
            task.looked = now
            why = "output" if _size(task.folder) > MOST_FOLDER else ""
        if why and not task.ended:
            task.ended = why
            _kill(task.pid)

    def _finish(self, task: RunningTask, batch: ProgramBatch) -> None:
        """Take what is left of its output, and forget it."""
        # What is left of its group, where forks cannot be refused. Not the process itself: its number may be another's by now.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(task.pid, signal.SIGKILL)
        self._read(task)
        del self._running[task.output]
        os.close(task.output)
        shutil.rmtree(task.folder, ignore_errors=True)
        if task.code in (-signal.SIGXCPU, -signal.SIGKILL):  # of the limit on its processor time
            task.ended = task.ended or "time"
        if len(task.read) > MOST_OUTPUT:
            task.ended = "output"
        text = task.read.decode(errors="replace")
        batch.results[task.program].append({"ended": task.ended or "exit", "code": task.code, "output": text})


def _take_places(task: Mapping[str, Any], output: int, server: int) -> None:
    """In the fork: its own group, its end with ours, and descriptors 0 to 3, with nothing else open."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        from backend.rewards.confinement.linux.libc import PR_SET_PDEATHSIG, prctl

        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    entered = _file_of(task.get("input", ""))
    is_tested = "tests" in task
    # Out of the way first: any of them may be one of the places.
    moved = [os.dup(file) for file in (entered, nowhere if is_tested else output, nowhere, output)]
    high = [_above(file) for file in moved]
    for place, file in enumerate(high if is_tested else high[:3]):
        os.dup2(file, place, inheritable=False)
    os.closerange(REPORTS + 1 if is_tested else REPORTS, 1 << 12)


def _above(file: int) -> int:
    """The same file under a number above all places."""
    import fcntl

    return fcntl.fcntl(file, fcntl.F_DUPFD, 16)


def _file_of(text: str) -> int:
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="replace"))
        file.seek(0)
        return os.dup(file.fileno())


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _size(folder: Path) -> int:
    """Bytes on disk below a folder."""
    total = 0
    with suppress(OSError):
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def load_confinement() -> None:
    """Import and work out what a fork needs to be confined: once, and not in every fork."""
    readable_by_programs()
    if sys.platform == "linux":
        from backend.rewards.confinement.linux import landlock, libc, privileges, seccomp

        assert all((landlock, libc, privileges, seccomp))


def why_not_confined(folder: Path) -> str:
    """Why programs could change a person's files; "" where they cannot. Tried in a fork."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        reason = "it cannot be tried"
        with suppress(BaseException):
            reason = confine_program(folder)
            os.write(theirs, reason.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        reason = pipe.read().decode()
    os.waitpid(pid, 0)
    return reason


def serve(requests: Sequence[Any] | Any, out: typing.TextIO, folder: Path) -> None:
    """Answer until the parent closes its end."""
    child_process.answer(out, {"confined": why_not_confined(folder)})
    server = ProgramServer(folder)
    with suppress(EOFError):
        for request in requests:
            child_process.answer(out, {"programs": server.run(ProgramBatch.of(request))})


def main() -> None:
    out = child_process.claim_stdout()
    load_confinement()
    folder, _ = make_working_folder()
    try:
        serve(child_process.requests(), out, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
