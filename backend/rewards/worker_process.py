"""Parent side of the reward worker: one request at a time, with enforced limits.

Answers are checked here. A worker that misbehaves is killed with its descendants and replaced at the next request.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from backend.rewards.calls import ASYNC_GRACE_S, Poll, timeout_words, wait_on
from backend.rewards.confinement.confine import confined_environment, secret_places
from backend.rewards.confinement.guard import END_SIGNAL
from backend.rewards.scoring import Request, ScoreRequest
from backend.rewards.worker import BEGIN, LOST_PIPE, SPOILED
from backend.rewards.working_folders import make_working_folder
from backend.utils.child_process import module_command
from backend.utils.command import backend_environment
from backend.utils.errors import UserError
from backend.utils.files import remove_tree

LONGEST_ANSWER = 64 << 20
MOST_OUTPUT = 64 << 10  # bytes of printed output to forward per request

START_S = 60.0  # seconds for the worker to start or read a request
EXIT_S = 1.0
_EXIT_CODE_S = 0.5
_GUARD_S = 6.0  # seconds for the guard to kill descendants
_LAST_WORDS_S = 2.0
_POLL_S = 0.05
_WROTE_INTO_PIPE = "wrote something of its own into the pipe by which scores are returned"

_SIGNALS = {
    signal.SIGSEGV: ", a segmentation fault",
    signal.SIGBUS: ", a bus error",
    signal.SIGABRT: ", an abort",
    signal.SIGKILL: ", killed, by itself or by the system when memory runs out",
    signal.SIGXCPU: ", out of processor time",
    signal.SIGILL: ", an illegal instruction",
    signal.SIGFPE: ", a floating-point exception",
}


class _WorkerLostError(Exception):
    """The worker failed. `what`: words after the name of the function at `index`."""

    def __init__(self, what: str, index: int = 0) -> None:
        super().__init__(what)
        self.what, self.index = what, max(index, 0)


class RewardWorker:
    """Runs reward functions in a confined process for one or more scorers, by key."""

    def __init__(self, network: bool = False) -> None:
        self.network = network
        self.generation = 0  # process counter; functions loaded in an earlier process are gone
        self._lock = threading.RLock()
        self._child: _Child | None = None
        self._keys: set[int] = set()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if it runs."""
        return self._child.process.pid if self._child else None

    def start(self) -> None:
        """Start a process if needed, without waiting. Raises UserError."""
        with self._lock:
            if self._child is None:
                try:
                    self._child = _Child(self.network)
                except OSError as error:
                    sentence = f"The process of the reward functions cannot be started: {error.strerror or error}."
                    raise UserError("reward_isolation", sentence) from error
                self.generation += 1

    def stop(self, grace_s: float = 0.0) -> None:
        """Kill the process and its descendants, after `grace_s` to end by itself."""
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                child.end(grace_s)

    def release(self, key: int) -> None:
        """Release a scorer's key; the last one stops the process."""
        with self._lock:
            self._keys.discard(key)
            if not self._keys:
                self.stop(EXIT_S)

    def ask(self, request: Request, poll: Poll = wait_on) -> Any:
        """The answer, of type `request.answer`; hangs and crashes become its `failure`.

        Raises what `poll` raises, and UserError for an unpicklable column; the process is gone then.
        """
        with self._lock:
            self._keys.add(request.key)
            self.start()
            assert self._child is not None
            try:
                self._child.send(request.slim() if isinstance(request, ScoreRequest) else request)
                raw = self._child.receive(request.timeout_s, request.calls, poll)
                answer = _adapter(request.answer).validate_python(raw)
                if not request.fits(answer):
                    raise _WorkerLostError(_WROTE_INTO_PIPE)
            except (_WorkerLostError, ValidationError) as lost:
                self.stop()
                is_lost = isinstance(lost, _WorkerLostError)
                return request.lost(lost.what if is_lost else _WROTE_INTO_PIPE, lost.index if is_lost else 0)
            except BaseException:
                self.stop()  # the answer to this request must not be taken for that to the next one
                raise
            if isinstance(request, ScoreRequest) and answer.failure and answer.failure.is_timeout:
                self.stop()  # the call still runs in it
            return answer


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class _Child:
    """One worker process, in a working folder of its own."""

    def __init__(self, network: bool) -> None:
        self.folder, kept = make_working_folder()
        self.process = subprocess.Popen(
            module_command("backend.rewards.worker"),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env=confined_environment(self.folder, network, backend_environment()),
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._requests, self._answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        for file in (self._requests, self._answers):
            os.set_blocking(file, False)
        self._output = _Output(self.process.stderr)
        self._end = weakref.finalize(self, _end, self.process, self._output, self.folder, kept)
        # Its own environment does not say where this user's secrets are.
        self.send((network, secret_places()))

    def end(self, grace_s: float) -> None:
        """Close its requests; after `grace_s` kill it and its descendants and remove its folder."""
        if ends := self._end.detach():
            _end(*ends[2], grace_s=grace_s)

    def send(self, request: Any) -> None:
        """Write a request. Raises UserError if it cannot be pickled, and _WorkerLostError."""
        self._output.next_request()
        try:
            rest = memoryview(pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL))
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

    def receive(self, limit_s: float, calls: int, poll: Poll) -> dict[str, Any]:
        """Read marks until the answer; each of `calls` calls has `limit_s` from its mark. Raises _WorkerLostError."""
        ready = select.poll()
        ready.register(self._answers, select.POLLIN)
        received, searched, index, is_async, since = bytearray(), 0, -1, False, time.monotonic()
        end = since + START_S + (limit_s + ASYNC_GRACE_S) * calls
        while True:
            poll()
            limit = max(START_S, limit_s) if index < 0 else limit_s + (ASYNC_GRACE_S if is_async else 0.0)
            left = min(since + limit, end) - time.monotonic()
            if left <= 0:
                silent = f"gave no answer for {START_S:.0f} s and more, as if its process had been stopped"
                raise _WorkerLostError(silent if index < 0 else timeout_words(limit_s), index)
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
                    message = json.loads(line[1:]) if line.startswith(BEGIN) else None
                except (ValueError, RecursionError):
                    message = None
                if isinstance(message, dict) and not received:
                    return message
                if not (isinstance(message, list) and [type(value) for value in message] == [int, bool]):
                    raise _WorkerLostError(_WROTE_INTO_PIPE, index)
                # The limits of calls that are awaited together begin together.
                if not (message[1] and is_async):
                    since = time.monotonic()
                index, is_async = message
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
        how = f"exit code {code}" if code >= 0 else f"signal {-code}{_SIGNALS.get(-code, '')}"  # pyright: ignore
        return f"ended the process it ran in ({how})"


def _end(process: subprocess.Popen[bytes], output: _Output, folder: Path, kept: int, grace_s: float = 0.0) -> None:
    assert process.stdin and process.stdout
    process.stdin.close()
    if grace_s:
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
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
        """Start to count anew."""
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
                    _write(kept.decode(errors="replace"))
        self.next_request()


def _write(text: str) -> None:
    with suppress(Exception):  # a closed terminal or a full disk is no reason to stop reading
        sys.stderr.write("".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text))
        sys.stderr.flush()
