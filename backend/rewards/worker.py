"""The reward worker: a confined process that runs reward files and functions, one request at a time, with enforced
limits. One that misbehaves is killed with its descendants and replaced at the next request.

Its stdin: pickles of a random prefix and, first, what to confine and the file for stacks, then a request of
`backend.rewards.scoring`. Its stdout: lines of that prefix and JSON: the index of each function that runs or −1, then
the answer.
"""

from __future__ import annotations

import faulthandler
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, NoReturn

from backend.rewards.calls import Caller, Failure, Poll, describe_error, printable, wait_on
from backend.rewards.confinement import confine
from backend.rewards.confinement.guard import END_SIGNAL, guard
from backend.rewards.scoring import Answer, FunctionHost, LoadRequest, Request, ScoreRequest, ToolRequest
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
_LOST_PIPE = 97  # exit code for closed pipes

_exit, _write, _getpid, _load = os._exit, os.write, os.getpid, pickle.load  # bound before user code can replace them
_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, default=str).encode


class RewardWorker:
    """Runs reward functions in a confined process for one or more scorers, by key."""

    def __init__(self, network: bool = False) -> None:
        self.network = network
        self.loaded: set[int] = set()  # keys of the scorers whose functions its process has
        self._lock = threading.RLock()
        self._child: _Child | None = None

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
                self.loaded.clear()
                child.end(grace_s)

    def release(self, key: int) -> None:
        """Release a scorer's key; the last one stops the process."""
        with self._lock:
            self.loaded.discard(key)
            if not self.loaded:
                self.stop(EXIT_S)

    def ask(self, request: Request, poll: Poll = wait_on) -> Answer:
        """Raises Failure, also for hangs and crashes, what `poll` raises, and UserError."""
        with self._lock:
            child = self.start()
            try:
                if isinstance(request, ScoreRequest):
                    request = replace(request, groups=[*map(_as_seen, request.groups)])
                child.send(request)
                answer = child.receive(request, poll)
            except Failure as failure:
                failure.function, failure.traceback = max(failure.function, 0), child.stack()
                self.stop()
                raise
            except BaseException:
                self.stop()  # the answer to this request must not be taken for that to the next one
                raise
            if answer.failure is None:
                self.loaded.add(request.key)
                return answer
            if answer.failure.hung:
                self.stop()  # tasks that ignore their cancellation would run on
            raise answer.failure


def _as_seen(group: Group) -> Group:
    """Without what functions do not get, such as log-probabilities."""
    unseen: dict[str, Any] = {name: [] for name in ("logps", "log_kept", "log_held", "mask")}
    completions = [replace(each, **unseen, scores={}, logged={}) for each in group.completions]
    return Group(replace(group.problem, tokens=[], row=dict(group.problem.row)), completions)


class _Child:
    """One worker process, in a working folder of its own."""

    def __init__(self, network: bool) -> None:
        folder, kept = confine.make_working_folder()
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
            env=confine.confined_environment(folder, network, backend_environment()),
            start_new_session=True,
            pass_fds=[self._stacks.fileno()],
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._requests, self._answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        for file in (self._requests, self._answers):
            os.set_blocking(file, False)
        self._output = _Output(self.process.stderr)
        self._end = weakref.finalize(self, _end, self.process, self._output, folder, kept)
        # Its own environment does not say where this user's secrets are.
        self.send((network, confine.secret_places(), self._stacks.fileno()))

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

    def send(self, request: Request | tuple[bool, list[Path], int]) -> None:
        """Write a request, or what to confine. Raises UserError if it cannot be pickled, and Failure."""
        if not (isinstance(request, ToolRequest) and request.begin is None):  # many of them are one rollout
            self._output.next_request()
        self._stacks.truncate(0)
        self._prefix = secrets.token_hex(8).encode()  # of its answer: other lines are user code's
        try:
            rest = memoryview(pickle.dumps((self._prefix, request), protocol=pickle.HIGHEST_PROTOCOL))
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
                    raise Failure("kept its process from reading the next completions")

    def receive(self, request: Request, poll: Poll) -> Answer:
        """Read marks until the answer; each function has `timeout_s` from its mark. Raises Failure."""
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
                if index >= 0:
                    raise Failure.of_hang(request.timeout_s, index)
                raise Failure(f"gave no answer for {own_s:.0f} s and more, as if its process had been stopped")
            if not ready.poll(1000 * min(_POLL_S, left)):
                if self.process.poll() is not None:  # a process that it has started may hold the pipe open
                    raise Failure(self._ended(), index)
                continue
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise Failure(self._ended(), index)
            received += piece
            while (newline := received.find(b"\n", searched)) >= 0:
                line, searched = received[:newline], 0
                del received[: newline + 1]
                try:
                    is_ours = line.startswith(self._prefix)
                    message: Any = json.loads(line[len(self._prefix) :]) if is_ours else None
                    if isinstance(message, dict) and not received:
                        return Answer.read(message)
                    if not isinstance(message, int):
                        raise ValueError
                    before, index = index, message
                except (ValueError, TypeError, RecursionError):
                    what = "wrote something of its own into the pipe by which scores are returned"
                    raise Failure(what, index) from None
                if before < 0 or index < 0:  # else it is awaited together with the one before
                    since = time.monotonic()
                if own_s == START_S:  # async functions are awaited after all have been called
                    own_s = max(OWN_S, limit_s)
                    end = since + limit_s * (calls + 1) + own_s
            searched = len(received)
            if searched > LONGEST_ANSWER:
                raise Failure(f"returned more than {LONGEST_ANSWER >> 20} MB", index)

    def _ended(self) -> str:
        try:
            code = self.process.wait(_EXIT_CODE_S)
        except subprocess.TimeoutExpired:
            code = _LOST_PIPE
        if code == _LOST_PIPE:
            return "closed or replaced the pipe by which scores are returned"
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
            _show(f"\n[{left_out:,} more bytes that reward functions printed are left out]\n")

    def run(self) -> None:
        with self._stream:
            while piece := self._stream.read(1 << 16):
                kept = piece[: max(MOST_OUTPUT - self._passed, 0)]
                self._passed += len(kept)
                self._left_out += len(piece) - len(kept)
                if kept:
                    _show(printable(kept.decode(errors="replace")))
        self.next_request()


def _show(text: str) -> None:
    with suppress(Exception):  # a closed terminal or a full disk is no reason to stop reading
        sys.stderr.write(text)
        sys.stderr.flush()


def main(arguments: Sequence[str] = ()) -> NoReturn:
    """Take over stdin and stdout, and answer until the parent closes its end."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)  # programs that user code starts do not inherit them
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    guard(requests.fileno())  # returns in the process that is guarded; both and what they start end with the parent
    pid, prefix, running = os.getpid(), b"", -1

    def send(message: str) -> None:
        if _getpid() != pid:  # a fork
            _exit(_LOST_PIPE)
        rest = memoryview(prefix + message.encode("ascii") + b"\n")
        try:
            while rest:
                rest = rest[_write(answers, rest) :]
        except OSError:  # user code has closed it
            _exit(_LOST_PIPE)

    def mark(index: int) -> None:
        nonlocal running
        if limit_s and min(index, running) < 0:  # a function that hangs leaves its stack
            faulthandler.dump_traceback_later(limit_s, file=stacks)
        running = index
        send(f"{index}")

    caller, limit_s, stacks, host = Caller(mark), 0.0, 2, None
    try:
        _, (network, secrets, stacks) = _load(requests)
        os.set_inheritable(stacks, False)
        confinement = confine.confine([Path.cwd()], network, secrets)
        if confinement.files:
            os.environ[confine.INSIDE] = "1"
        faulthandler.enable(stacks)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
        host = FunctionHost(caller, confinement.sentences())
        while True:
            try:
                prefix, request = _load(requests)
            except OSError:
                _exit(_LOST_PIPE)
            running, limit_s = -1, request.timeout_s
            if isinstance(request, LoadRequest):
                mark(0)
            try:
                answer = host.ask(request)
            except Failure as failure:
                answer = Answer(failure)
            faulthandler.cancel_dump_traceback_later()
            with suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            send(_encode(asdict(answer)))
    except EOFError:
        (host or caller).close()
        sys.exit()  # a user's `atexit` functions run now, and files are flushed
    except BaseException as error:
        try:
            _write(2, f"The process of the reward functions gave up: {describe_error(error, None)}.\n".encode())
        finally:
            _exit(1)


if __name__ == "__main__":
    main()
