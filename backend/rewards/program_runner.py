"""Run model-written programs confined, in parallel and with time limits.

A server forks a process per program, which reads its source from the pipe and forks for each task
(`backend.rewards.program`). Programs never see each other or expected values.

Request: {"tasks", "seconds", "memory_mb", "deadline_s"}; answer: [{"ended": "exit" | "time" | "output" | "limit",
"code", "output"}] for the tasks that ran. A task is {"source", "input"}, judged by output, or {"source", "setup",
"tests"}, judged by reports. `seconds` of CPU time per task, twice that on the clock for all; "limit": `deadline_s` are
over.
"""

from __future__ import annotations

import atexit
import bisect
import collections
import fcntl
import functools
import heapq
import itertools
import json
import math
import os
import random
import re
import select
import signal
import string
import struct
import subprocess
import sys
import tempfile
import threading
import time
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from backend.rewards.confinement.confine import confine_program, load_for_programs, make_working_folder
from backend.rewards.program import REPORTS, become_program
from backend.utils.child_process import module_command
from backend.utils.command import backend_environment
from backend.utils.files import remove_tree, walk

PRELOADED = (bisect, collections, functools, heapq, itertools, math, random, re, string, typing)
"""Modules to preload before forking."""
MOST_OUTPUT = 256 << 10  # maximum bytes of a task's output or reports
MOST_FOLDER = 16 << 20  # maximum bytes in a program's folder
_GRACE_S = 5.0  # seconds past the deadline to wait for an answer
_START_S = 60.0
_POLL_S = 0.02
_FOLDER_POLL_S = 0.2
_HEADER = struct.Struct("<II")  # program number and JSON length

Task = Mapping[str, Any]
TaskResult = Mapping[str, Any]


class ProgramRunner:
    """The server, started on first use. `run` is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._received = bytearray()
        self._not_confined = ""

    @property
    def pid(self) -> int | None:
        """Process id of the server, if it runs."""
        return self._server.pid if self._server else None

    def run(
        self, programs: Sequence[Sequence[Task]], *, seconds: float, memory_mb: int, deadline_s: float
    ) -> list[list[TaskResult]] | None:
        """Results of each program's completed tasks; None if the server was lost.

        Raises PermissionError if programs cannot be confined.
        """
        deadline = time.monotonic() + deadline_s
        with self._lock:
            try:
                if self._server is None:
                    self._received.clear()
                    self._server = subprocess.Popen(
                        module_command("backend.rewards.program_runner"),
                        bufsize=0,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        env=backend_environment(),
                        start_new_session=True,
                    )
                    _, self._not_confined = self._receive(time.monotonic() + _START_S)
                if self._not_confined:
                    raise PermissionError(self._not_confined)
                assert self._server.stdin is not None
                results: list[list[TaskResult]] = [[] for _ in programs]
                waiting = collections.deque(number for number, tasks in enumerate(programs) if tasks)
                processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
                running = 0
                while True:
                    while waiting and running < processors and (left := deadline - time.monotonic()) > 0:
                        number = waiting.popleft()
                        limits = {"seconds": seconds, "memory_mb": memory_mb, "deadline_s": left}
                        _write(self._server.stdin.fileno(), _message(number, {**limits, "tasks": programs[number]}))
                        running += 1
                    if not running:
                        return results
                    number, results[number] = self._receive(deadline + _GRACE_S)
                    running -= 1
            except PermissionError:
                raise
            except (OSError, EOFError):
                self.close()
                return None

    def _receive(self, deadline: float) -> tuple[int, Any]:
        assert self._server is not None and self._server.stdout is not None
        file, received = self._server.stdout.fileno(), self._received
        while True:
            if len(received) >= _HEADER.size:
                number, length = _HEADER.unpack_from(received)
                end = _HEADER.size + length
                if len(received) >= end:
                    answer = json.loads(received[_HEADER.size : end])
                    del received[:end]
                    return number, answer
            if not select.select([file], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError
            piece = os.read(file, 1 << 16)
            if not piece:
                raise EOFError
            received += piece

    def close(self) -> None:
        """Stop the server and its forks."""
        server, self._server = self._server, None
        if server is None:
            return
        assert server.stdin is not None and server.stdout is not None
        with suppress(OSError):
            server.stdin.close()
        try:
            server.wait(1.0)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


runner = ProgramRunner()
atexit.register(runner.close)


def main(arguments: Sequence[str] = ()) -> None:
    """The single-threaded server."""
    load_for_programs()
    folder, _ = make_working_folder()
    try:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:  # tries the confinement
            with suppress(BaseException):
                os.write(theirs, confine_program(folder).encode() or b"-")
            os._exit(0)
        os.close(theirs)
        with open(ours, "rb") as pipe:
            reason = pipe.read().decode() or "it cannot be tried"
        os.waitpid(pid, 0)
        _write(1, _message(0, "" if reason == "-" else reason))
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
        server = os.getpid()
        while header := _read(0, _HEADER.size):
            number, length = _HEADER.unpack(header)
            taken, taking = os.pipe()
            if os.fork() == 0:
                with suppress(BaseException):
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    request = json.loads(_read(0, length))
                    os.close(taking)
                    answer = _message(number, _run_tasks(request, Path(tempfile.mkdtemp(dir=folder)), server))
                    with open(folder / "lock", "w") as lock:
                        fcntl.flock(lock, fcntl.LOCK_EX)  # one answer at a time
                        _write(1, answer)
                os._exit(0)
            os.close(taking)
            os.read(taken, 1)  # the end: the fork has taken its request off the pipe
            os.close(taken)
    finally:
        remove_tree(folder)


def _run_tasks(request: Mapping[str, Any], folder: Path, server: int) -> list[TaskResult]:
    begun = time.monotonic()
    deadline = begun + request["deadline_s"]
    until = min(begun + 2 * request["seconds"], deadline)
    results: list[TaskResult] = []
    for number, task in enumerate(request["tasks"]):
        task_folder = folder / str(number)
        task_folder.mkdir()
        result = _run_task(task, task_folder, request, until, server)
        remove_tree(task_folder)
        if result["ended"] == "time" and until >= deadline and time.monotonic() >= deadline:
            result["ended"] = "limit"
        results.append(result)
        if result["ended"] != "exit" or time.monotonic() >= deadline:
            break
    remove_tree(folder)
    return results


def _run_task(task: Task, folder: Path, limits: Mapping[str, Any], until: float, server: int) -> dict[str, Any]:
    output, its_output = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            _take_places(task, its_output, parent)
            become_program(task, folder, limits["seconds"], limits["memory_mb"])
        os._exit(1)
    os.close(its_output)
    with suppress(OSError):  # the fork does the same: whoever is first
        os.setpgid(pid, pid)
    os.set_blocking(output, False)
    received, ended, code, looked, is_open = bytearray(), "", None, time.monotonic(), True
    while code is None:
        if is_open and select.select([output], [], [], _POLL_S)[0]:
            is_open = _read_all(output, received)
        elif not is_open:
            time.sleep(0.001)
        now = time.monotonic()
        why = "output" if len(received) > MOST_OUTPUT else "time" if now >= until else ""
        if not why and now - looked > _FOLDER_POLL_S:
            looked = now
            with suppress(OSError):
                sizes = (entry.stat(follow_symlinks=False).st_blocks * 512 for entry in walk(folder))
                why = "output" if sum(sizes) > MOST_FOLDER else ""
        is_lost = os.getppid() != server
        if is_lost or (why and not ended):
            ended = why
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        if is_lost:
            os._exit(1)
        done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
    with suppress(ProcessLookupError, PermissionError):  # what is left of its group, where forks cannot be refused
        os.killpg(pid, signal.SIGKILL)
    _read_all(output, received)
    os.close(output)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):  # of the limit on its processor time
        ended = ended or "time"
    if len(received) > MOST_OUTPUT:
        ended = "output"
    return {"ended": ended or "exit", "code": code, "output": received.decode(errors="replace")}


def _take_places(task: Task, output: int, parent: int) -> None:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        from backend.rewards.confinement.landlock import PR_SET_PDEATHSIG, prctl

        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    with tempfile.TemporaryFile() as file:
        file.write(task.get("input", "").encode(errors="replace"))
        file.seek(0)
        entered = os.dup(file.fileno())
    places = [entered, nowhere, nowhere, output] if "tests" in task else [entered, output, nowhere]
    # Above all places first: any of them may be one of the places.
    for place, file in enumerate([fcntl.fcntl(file, fcntl.F_DUPFD, 16) for file in places]):
        os.dup2(file, place, inheritable=False)
    os.closerange(len(places), 1 << 12)
    assert len(places) <= REPORTS + 1


def _read_all(file: int, received: bytearray) -> bool:
    with suppress(BlockingIOError):
        while len(received) <= MOST_OUTPUT:
            piece = os.read(file, 1 << 16)
            if not piece:
                return False
            received += piece
    return True


def _message(number: int, content: Any) -> bytes:
    body = json.dumps(content).encode()
    return _HEADER.pack(number, len(body)) + body


def _read(file: int, count: int) -> bytes:
    received = b""
    while len(received) < count and (piece := os.read(file, count - len(received))):
        received += piece
    return received


def _write(file: int, message: bytes) -> None:
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(file, rest) :]


if __name__ == "__main__":
    main()
