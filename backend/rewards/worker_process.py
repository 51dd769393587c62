"""Parent side of the reward worker: one request at a time, with enforced limits. Answers are checked here. A worker
that misbehaves is killed with its descendants and replaced at the next request."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from backend.rewards.calls import Poll, timeout_words, wait_on
from backend.rewards.confinement.confine import confined_environment, make_working_folder, secret_places
from backend.rewards.confinement.guard import END_SIGNAL
from backend.rewards.errors import Failure, printable
from backend.rewards.scoring import Answer, LoadRequest, MapRequest, Request, ScoreRequest, ToolRequest
from backend.rewards.worker import LOST_PIPE, SPOILED
from backend.types import Group
from backend.utils.child_process import module_command
from backend.utils.command import backend_environment
from backend.utils.errors import LONGEST_TRACEBACK, UserError
from backend.utils.files import remove_tree

LONGEST_ANSWER = 64 << 20
MOST_OUTPUT = 64 << 10  # bytes of printed output to forward per request

START_S = 60.0  # seconds for the worker to start or read a request
OWN_S = 10.0  # seconds between functions, and to return an answer
EXIT_S = 1.0
_STACK_S = 0.5  # seconds past a limit for the worker to say where it hangs
_LOCK_S = 5.0  # seconds past the limit of a call for the worker to answer, unless the call keeps Python's lock
_EXIT_CODE_S = 0.5
_GUARD_S = 6.0  # seconds for the guard to kill descendants
_LAST_WORDS_S = 2.0
_POLL_S = 0.05
_WROTE_INTO_PIPE = "wrote something of its own into the pipe by which scores are returned"
_ANSWER = TypeAdapter(Answer)


class _WorkerLostError(Exception):
    """The worker failed. `what`: words after the name of the function at `index`."""

    def __init__(self, what: str, index: int = 0) -> None:
        super().__init__(what)
        self.what, self.index = what, max(index, 0)


class RewardWorker:
    """Runs reward functions in a confined process for one or more scorers, by key."""

    def __init__(self, network: bool = False) -> None:
        self.network = network
        self.generation = 0  # how many processes have ended, and what was loaded in them is gone
        self._lock = threading.RLock()
        self._child: _Child | None = None
        self._keys: set[int] = set()

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child else None

    def start(self) -> _Child:
        """Start a process if needed, without waiting. Raises UserError."""
        with self._lock:
            try:
                self._child = self._child or _Child(self.network)
            except OSError as error:
                sentence = f"The process of the reward functions cannot be started: {error.strerror or error}."
                raise UserError("reward_isolation", sentence) from error
            return self._child

    def stop(self, grace_s: float = 0.0) -> None:
        """Kill the process and its descendants, after `grace_s` to end by itself."""
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                self.generation += 1
                child.end(grace_s)

    def release(self, key: int) -> None:
        """Release a scorer's key; the last one stops the process."""
        with self._lock:
            self._keys.discard(key)
            if not self._keys:
                self.stop(EXIT_S)

    def ask(self, request: Request, poll: Poll = wait_on) -> Answer:
        """The answer; hangs and crashes become its `failure`. Raises what `poll` raises, and UserError for an
        unpicklable column; the process is gone then."""
        with self._lock:
            self._keys.add(request.key)
            child = self.start()
            try:
                child.send(_slim(request) if isinstance(request, ScoreRequest) else request)
                answer = child.receive(request, poll)
                if not _fits(request, answer):
                    raise _WorkerLostError(_WROTE_INTO_PIPE)
                if answer.failure and answer.failure.what == timeout_words(request.timeout_s):
                    self.stop()  # tasks that ignore their cancellation would run on
                return answer
            except _WorkerLostError as lost:
                failure = Failure(lost.what, lost.index, traceback=child.stack())
                self.stop()
                return Answer(failure)
            except BaseException:
                self.stop()  # the answer to this request must not be taken for that to the next one
                raise


def _slim(request: ScoreRequest) -> ScoreRequest:
    """Without what reward functions do not get, such as log-probabilities."""
    groups = [
        Group(
            replace(group.problem, tokens=[], row=dict(group.problem.row)),
            [
                replace(each, logps=[], log_kept=[], log_held=[], mask=[], scores={}, logged={})
                for each in group.completions
            ],
        )
        for group in request.groups
    ]
    return replace(request, groups=groups)


def _fits(request: Request, answer: Answer) -> bool:
    """False for an answer to something else, which user code has written: it can find the prefix."""
    failure = answer.failure
    if isinstance(request, ScoreRequest):
        functions, count = len(request.indices), sum(len(group.completions) for group in request.groups)
        if failure:
            return 0 <= failure.function < functions and 0 <= (failure.completion or 0) < count
        columns = (*answer.scores, *answer.columns.values())
        return len(answer.scores) == len(answer.seconds) == functions and all(len(c) == count for c in columns)
    if isinstance(request, MapRequest):
        return 0 <= (failure.completion or 0) < len(request.rows) if failure else len(answer.rows) == len(request.rows)
    if isinstance(request, LoadRequest) and not failure:
        named, found = list(map(len, request.source.stages)), list(map(len, answer.stages))
        return named == found or (request.tools is not None and len(named) == len(found))
    return True


class _Child:
    """One worker process, in a working folder of its own."""

    def __init__(self, network: bool) -> None:
        folder, kept = make_working_folder()
        self.folder = folder
        # Open before the worker is confined, and read without mapping it: user code may write and truncate it.
        self._stacks = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self.process = subprocess.Popen(
            module_command("backend.rewards.worker"),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=confined_environment(folder, network, backend_environment()),
            start_new_session=True,
            pass_fds=[self._stacks.fileno()],
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._requests, self._answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        for file in (self._requests, self._answers):
            os.set_blocking(file, False)
        self._output = _Output(self.process.stderr)
        self._end = weakref.finalize(self, _end, self.process, self._output, folder, kept)
        self._prefix = b""
        # Its own environment does not say where this user's secrets are.
        self._send((network, secret_places(), self._stacks.fileno()))

    def end(self, grace_s: float) -> None:
        """Close its requests; after `grace_s` kill it and its descendants and remove its folder."""
        assert self.process.stdin
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self._end()

    def stack(self) -> str:
        """Where it was when it hung or crashed."""
        return printable(os.pread(self._stacks.fileno(), LONGEST_TRACEBACK, 0).decode(errors="replace"))

    def send(self, request: Request) -> None:
        """Write a request. Raises UserError if it cannot be pickled, and _WorkerLostError."""
        self._prefix = secrets.token_hex(8).encode()  # of its answer: other lines are user code's
        is_poll = isinstance(request, ToolRequest) and request.begin is None
        self._send((self._prefix, request), is_poll=is_poll)

    def _send(self, message: Any, *, is_poll: bool = False) -> None:
        if not is_poll:  # many of them are one rollout
            self._output.next_request()
        self._stacks.truncate(0)
        try:
            rest = memoryview(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        except Exception as error:  # the type of an object in a row decides
            sentence = f"A column holds what cannot be handed to reward functions: {type(error).__name__}."
            raise UserError("data", sentence) from error
        poll, deadline = select.poll(), time.monotonic() + START_S
        poll.register(self._requests, select.POLLOUT)
        with suppress(BrokenPipeError):  # receiving finds how the process has ended
            while rest:
                if poll.poll(1000 * _POLL_S):
                    rest = rest[os.write(self._requests, rest) :]
                elif time.monotonic() > deadline:
                    raise _WorkerLostError("kept its process from reading the next completions")

    def receive(self, request: Request, poll: Poll) -> Answer:
        """Read marks until the answer; each call of a function has `timeout_s` from its mark. Raises
        _WorkerLostError."""
        limit_s = request.timeout_s + (_LOCK_S if isinstance(request, ToolRequest) else _STACK_S)
        calls = len(request.indices) if isinstance(request, ScoreRequest) else 1
        ready = select.poll()
        ready.register(self._answers, select.POLLIN)
        received, searched, since = bytearray(), 0, time.monotonic()
        index = 0 if isinstance(request, ToolRequest) else -1  # its answer waits for nothing but Python's lock
        own_s, end = START_S, float("inf")
        while True:
            poll()
            left = min(since + (own_s if index < 0 else limit_s), end) - time.monotonic()
            if left <= 0:
                silent = f"gave no answer for {own_s:.0f} s and more, as if its process had been stopped"
                raise _WorkerLostError(silent if index < 0 else timeout_words(request.timeout_s), index)
            if not ready.poll(1000 * min(_POLL_S, left)):
                if self.process.poll() is not None:  # a process that it has started may hold the pipe open
                    raise _WorkerLostError(self._ended(), index)
                continue
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise _WorkerLostError(self._ended(), index)
            received += piece
            while (newline := received.find(b"\n", searched)) >= 0:
                line, searched = received[:newline], 0
                del received[: newline + 1]
                try:
                    is_ours = line.startswith(self._prefix)
                    message = json.loads(line[len(self._prefix) :]) if is_ours else None
                    if isinstance(message, dict) and not received:
                        return _ANSWER.validate_python(message)
                except (ValueError, RecursionError, ValidationError):
                    message = None
                if not (
                    isinstance(message, list) and [*map(type, message)] == [int, bool] and -1 <= message[0] < calls
                ):
                    raise _WorkerLostError(_WROTE_INTO_PIPE, index)
                index, begins = message
                since = time.monotonic() if begins else since
                if own_s == START_S:  # async functions are awaited after all have been called
                    own_s = max(OWN_S, limit_s)
                    end = since + limit_s * (calls + 1) + own_s
            searched = len(received)
            if searched > LONGEST_ANSWER:
                raise _WorkerLostError(f"returned more than {LONGEST_ANSWER >> 20} MB", index)

    def _ended(self) -> str:
        try:
            code = self.process.wait(_EXIT_CODE_S)
        except subprocess.TimeoutExpired:
            code = LOST_PIPE
        if code == LOST_PIPE:
            return "closed or replaced the pipe by which scores are returned"
        if code == SPOILED:
            return "left Python in a state in which its process could not go on"
        how = f"exit code {code}"
        if code < 0:
            name = (signal.strsignal(-code) or "").lower()
            how = f"signal {-code}{f', {name}' if name else ''}"
            how += ", by itself or by the system when memory runs out" if -code == signal.SIGKILL else ""
        return f"ended the process it ran in ({how})"


def _end(process: subprocess.Popen[bytes], output: _Output, folder: Path, kept: int) -> None:
    assert process.stdin and process.stdout
    process.stdin.close()
    process.send_signal(END_SIGNAL)  # its guard kills all that there is, then itself
    try:
        process.wait(_GUARD_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    output.join(_LAST_WORDS_S)
    remove_tree(folder)
    os.close(kept)


class _Output(threading.Thread):
    """Forwards the worker's output to stderr, up to `MOST_OUTPUT` bytes per request."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(name="output of the reward worker", daemon=True)
        self._stream = stream
        self._passed = self._left_out = 0
        self.start()

    def next_request(self) -> None:
        self._passed = 0
        left_out, self._left_out = self._left_out, 0
        if left_out:
            _write(f"\n[{left_out:,} more bytes that reward functions printed are left out]\n")

    def run(self) -> None:
        with self._stream:
            while piece := self._stream.read(1 << 16):
                kept = piece[: max(MOST_OUTPUT - self._passed, 0)]
                self._passed += len(kept)
                self._left_out += len(piece) - len(kept)
                if kept:
                    _write(printable(kept.decode(errors="replace")))
        self.next_request()


def _write(text: str) -> None:
    with suppress(Exception):  # a closed terminal or a full disk is no reason to stop reading
        sys.stderr.write(text)
        sys.stderr.flush()
