"""Parent side of the reward worker: one request at a time, with enforced limits.

Requests are length and pickle; responses length and JSON: marks [function index, is async] and one answer, checked
here. A worker that misbehaves is killed with its descendants and replaced at the next request.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from backend.rewards.calls import ASYNC_GRACE_S, Poll, timeout_words, wait_on
from backend.rewards.confinement.confine import confined_environment, secret_places
from backend.rewards.confinement.guard import END_SIGNAL
from backend.rewards.errors import Failure, LoadError
from backend.rewards.inputs import TrainerState
from backend.rewards.scoring import Loaded, Mapped, RewardSource, Scored
from backend.rewards.working_folders import make_working_folder, remove_tree
from backend.types import Completion, Group, Problem
from backend.utils.child_process import module_command
from backend.utils.command import backend_environment
from backend.utils.errors import ConfigProblem, UserError

LOST_PIPE = 97
"""Exit code for closed pipes."""
SPOILED = 98
"""Exit code if user code broke our code in the worker."""
LONGEST_ANSWER = 64 << 20
"""Maximum bytes of an answer."""
MOST_OUTPUT = 64 << 10
"""Bytes of printed output to forward per request."""

START_S = 60.0
"""Seconds for the worker to start or read a request."""
EXIT_S = 1.0
"""Seconds for the worker to exit at the end of a run."""
_EXIT_CODE_S = 0.5
_GUARD_S = 6.0
"""Seconds for the guard to kill descendants."""
_LAST_WORDS_S = 2.0
_POLL_S = 0.05
_LENGTH = struct.Struct("<Q")
_FRAME = struct.Struct("<BI")
_BEGIN = 0x1E
"""Prefix of worker messages; other bytes are user code's."""
_WROTE_INTO_PIPE = "wrote something of its own into the pipe by which scores are returned"

_SIGNALS = {
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGBUS: "a bus error",
    signal.SIGABRT: "an abort",
    signal.SIGKILL: "killed, by itself or by the system when memory runs out",
    signal.SIGXCPU: "out of processor time",
    signal.SIGILL: "an illegal instruction",
    signal.SIGFPE: "a floating-point exception",
}

T = TypeVar("T")


class _WorkerLostError(Exception):
    """The worker failed and is gone. `what`: words after the name of the function at `index`."""

    def __init__(self, what: str, index: int = 0) -> None:
        super().__init__(what)
        self.what, self.index = what, max(index, 0)


class RewardWorker:
    """Runs reward functions in a confined process for one or more scorers, by key."""

    def __init__(self, network: bool = False) -> None:
        """`network`: allow network access (`reward_network`)."""
        self.network = network
        self.generation = 0
        """Process counter; functions loaded in an earlier process are gone."""
        self.lock = threading.RLock()
        self._child: _Child | None = None
        self._keys: set[int] = set()

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child else None

    def start(self) -> None:
        """Start a process if needed, without waiting. Raises UserError."""
        with self.lock:
            if self._child is None:
                try:
                    self._child = _Child(self.network)
                except OSError as error:
                    sentence = f"The process of the reward functions cannot be started: {error.strerror or error}."
                    raise UserError("reward_isolation", sentence) from error
                self.generation += 1

    def stop(self, grace_s: float = 0.0) -> None:
        """Kill the process and its descendants."""
        with self.lock:
            child, self._child = self._child, None
            if child is not None:
                child.end(grace_s)

    def release(self, key: int) -> None:
        """Release a scorer's key; the last one stops the process."""
        with self.lock:
            self._keys.discard(key)
            if not self._keys:
                self.stop(EXIT_S)

    def load(self, key: int, source: RewardSource, timeout_s: float, poll: Poll = wait_on) -> Loaded:
        """As `FunctionHost.load`."""
        self._keys.add(key)
        request = {"load": key, "source": source, "timeout": timeout_s}
        counts = [len(stage) for stage in source.stages]
        try:
            answer = self._request(request, timeout_s, max(1, len(source.files)), poll)
            if "problems" in answer:
                problems = [ConfigProblem(*problem) for problem in answer["problems"]]
                raise LoadError(problems, _checked(Failure, answer["failure"]))
            loaded = _checked(Loaded, answer, lambda loaded: [len(stage) for stage in loaded.stages] == counts)
        except _WorkerLostError as lost:
            file = source.file or next(iter(source.files), None)
            sentence = f"{file.name if file else 'The process that scores'} {lost.what} while it was being loaded."
            setting = "reward_functions_file" if source.file else "reward_functions"
            raise LoadError([ConfigProblem(setting, sentence)], Failure(sentence, file=str(file or ""))) from None
        return loaded

    def score(
        self,
        key: int,
        stage: int,
        indices: Sequence[int],
        groups: Sequence[Group],
        timeout_s: float,
        state: TrainerState,
        captures: bool = False,
        poll: Poll = wait_on,
    ) -> Scored:
        """As `FunctionHost.score`; hangs and crashes become a `failure`."""
        request = {
            "score": key,
            "stage": stage,
            "indices": list(indices),
            "groups": packed(groups),
            "timeout": timeout_s,
            "state": state,
            "captures": captures,
        }
        count = sum(len(group.completions) for group in groups)

        def fits(scored: Scored) -> bool:
            if scored.failure is not None:
                return scored.failure.function < len(indices) and scored.failure.completion < count
            columns = (*scored.scores, *scored.columns.values())
            return len(scored.scores) == len(indices) and all(len(column) == count for column in columns)

        try:
            scored = _checked(Scored, self._request(request, timeout_s, len(indices), poll), fits)
        except _WorkerLostError as lost:
            self.stop()
            return Scored(failure=Failure(lost.what, min(lost.index, len(indices) - 1)))
        if scored.failure is not None and scored.failure.is_timeout:
            self.stop()  # the call still runs in it
        return scored

    def map_rows(
        self, key: int, function: str, rows: Sequence[dict[str, Any]], timeout_s: float, poll: Poll = wait_on
    ) -> Mapped:
        """As `FunctionHost.map_rows`."""
        request = {"map": key, "function": function, "rows": list(rows), "timeout": timeout_s}
        try:
            answer = self._request(request, timeout_s, 1, poll)
            return _checked(Mapped, answer, lambda mapped: bool(mapped.failure) or len(mapped.rows) in (0, len(rows)))
        except _WorkerLostError as lost:
            self.stop()
            return Mapped(failure=lost.what)

    def _request(self, request: dict[str, Any], limit_s: float, calls: int, poll: Poll) -> dict[str, Any]:
        """Unchecked answer; `limit_s` for each of `calls` calls.

        Raises _WorkerLostError, what `poll` raises, and UserError for an unpicklable column; the process is gone then.
        """
        with self.lock:
            self.start()
            child = self._child
            assert child is not None
            try:
                child.output.next_request()
                _send(child, _request_bytes(request))
                return _receive(child, limit_s, calls, poll)
            except BaseException:
                self.stop()  # the answer to this request must not be taken for that to the next one
                raise


def _checked(kind: type[T], answer: Any, fits: Callable[[T], bool] = lambda value: True) -> T:
    """Answer as a dataclass. Raises _WorkerLostError if invalid."""
    try:
        value = _adapter(kind).validate_python(answer)
    except ValidationError:
        raise _WorkerLostError(_WROTE_INTO_PIPE) from None
    if not fits(value):
        raise _WorkerLostError(_WROTE_INTO_PIPE)
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _request_bytes(request: Any) -> bytes:
    try:
        pickled = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the type of an object in a row decides
        sentence = f"A column holds what cannot be handed to reward functions: {type(error).__name__}."
        raise UserError("data", sentence) from error
    return _LENGTH.pack(len(pickled)) + pickled


def _send(child: _Child, request: bytes) -> None:
    rest = memoryview(request)
    poll = select.poll()
    poll.register(child.requests, select.POLLOUT)
    deadline = time.monotonic() + START_S
    with suppress(BrokenPipeError):  # receiving finds how the process has ended
        while rest:
            if poll.poll(1000 * _POLL_S):
                rest = rest[os.write(child.requests, rest) :]
            elif time.monotonic() > deadline:
                raise _WorkerLostError("kept its process from reading the next completions")


def _receive(child: _Child, limit_s: float, calls: int, poll: Poll) -> dict[str, Any]:
    """Read marks until the answer; each call has `limit_s` from its mark."""
    ready = select.poll()
    ready.register(child.answers, select.POLLIN)
    received, mark, since = bytearray(), (-1, False), time.monotonic()
    end = since + START_S + (limit_s + ASYNC_GRACE_S) * calls
    while True:
        poll()
        index, is_async = mark
        limit = max(START_S, limit_s) if index < 0 else limit_s + (ASYNC_GRACE_S if is_async else 0.0)
        left = min(since + limit, end) - time.monotonic()
        if left <= 0:
            silent = f"gave no answer for {START_S:.0f} s and more, as if its process had been stopped"
            raise _WorkerLostError(silent if index < 0 else timeout_words(limit_s), index)
        if not ready.poll(1000 * min(_POLL_S, left)):
            if child.process.poll() is not None:  # a process that it has started may hold the pipe open
                raise _WorkerLostError(_end_of(child), index)
            continue
        piece = os.read(child.answers, 1 << 20)
        if not piece:
            raise _WorkerLostError(_end_of(child), index)
        received += piece
        while len(received) >= _FRAME.size:
            begin, length = _FRAME.unpack_from(received)
            if begin != _BEGIN:
                raise _WorkerLostError(_WROTE_INTO_PIPE, index)
            if length > LONGEST_ANSWER:
                raise _WorkerLostError(f"returned more than {LONGEST_ANSWER >> 20} MB", index)
            if len(received) < _FRAME.size + length:
                break
            try:
                message = json.loads(received[_FRAME.size : _FRAME.size + length])
            except (ValueError, RecursionError):
                raise _WorkerLostError(_WROTE_INTO_PIPE, index) from None
            del received[: _FRAME.size + length]
            if isinstance(message, dict) and not received:
                return message
            if not (isinstance(message, list) and [type(value) for value in message] == [int, bool]):
                raise _WorkerLostError(_WROTE_INTO_PIPE, index)
            # The limits of calls that are awaited together begin together.
            if not (message[1] and mark[1]):
                since = time.monotonic()
            mark = (message[0], message[1])


def _end_of(child: _Child) -> str:
    """How the process ended, as words after a function's name."""
    try:
        code = child.process.wait(_EXIT_CODE_S)
    except subprocess.TimeoutExpired:
        code = LOST_PIPE
    if code == LOST_PIPE:
        return "closed or replaced the pipe by which scores are returned"
    if code == SPOILED:
        return "left Python in a state in which its process could not go on"
    known = next((words for number, words in _SIGNALS.items() if number == -code), "")
    how = f"exit code {code}" if code >= 0 else f"signal {-code}{f', {known}' if known else ''}"
    return f"ended the process it ran in ({how})"


class _Child:
    """One worker process with our non-blocking pipe ends."""

    def __init__(self, network: bool) -> None:
        folder, kept = make_working_folder()
        (its_requests, self.requests), (self.answers, its_answers), (output, its_output) = (os.pipe() for _ in range(3))
        self.process = subprocess.Popen(
            [*module_command("backend.rewards.worker", "scorer"), str(its_requests), str(its_answers)],
            pass_fds=(its_requests, its_answers),
            stdin=subprocess.DEVNULL,
            stdout=its_output,
            stderr=its_output,
            cwd=folder,
            env=confined_environment(folder, network, backend_environment()),
            start_new_session=True,
        )
        for file in (its_requests, its_answers, its_output):
            os.close(file)
        # Its own environment does not say where this user's secrets are. The pipe is empty, so this does not block.
        begin = {"network": network, "secrets": [str(place) for place in secret_places()]}
        with suppress(BrokenPipeError):
            os.write(self.requests, _request_bytes(begin))
        os.set_blocking(self.requests, False)
        os.set_blocking(self.answers, False)
        self.folder = folder
        self.output = _Output(output)
        self._ends = (self.process, self.requests, self.answers, self.output, folder, kept)
        self._finalizer = weakref.finalize(self, _end, *self._ends, 0.0)

    def end(self, grace_s: float) -> None:
        """Close its requests; after `grace_s` kill it and its descendants and remove its folder."""
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
    if grace_s:
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    process.send_signal(END_SIGNAL)  # its guard kills all that there is, then itself
    try:
        process.wait(_GUARD_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    os.close(answers)
    output.join(_LAST_WORDS_S)
    remove_tree(folder)
    os.close(kept)


class _Output(threading.Thread):
    """Forwards the worker's output to stderr, up to `MOST_OUTPUT` bytes per request."""

    def __init__(self, file: int) -> None:
        super().__init__(name="output of the reward worker", daemon=True)
        self._file = file
        self._passed = self._left_out = 0
        self.start()

    def next_request(self) -> None:
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
    with suppress(Exception):  # a closed terminal or a full disk is no reason to stop reading
        sys.stderr.write("".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text))
        sys.stderr.flush()


PackedGroup = tuple[str, list[dict[str, Any]], str, str | None, Mapping[str, Any], list[tuple[str, "array[int]"]]]
"""A problem's prompt, messages, answer, type and row; texts and token ids of its completions."""


def packed(groups: Iterable[Group]) -> list[PackedGroup]:
    """Data of the groups for reward functions."""
    return [
        (
            *(
                group.problem.prompt,
                group.problem.messages,
                group.problem.answer,
                group.problem.type,
                group.problem.row,
            ),
            [(completion.text, array("q", completion.tokens)) for completion in group.completions],
        )
        for group in groups
    ]


def unpacked(groups: Iterable[PackedGroup]) -> list[Group]:
    return [
        Group(
            Problem(index, prompt, messages, [], answer, kind, dict(row)),
            [Completion(tokens.tolist(), [], text, "eos") for text, tokens in completions],
        )
        for index, (prompt, messages, answer, kind, row, completions) in enumerate(groups)
    ]


def frame(message: bytes) -> bytes:
    """A framed worker message."""
    return _FRAME.pack(_BEGIN, len(message)) + message


def read_request(read: Callable[[int], bytes]) -> Any:
    """The next request; `read(count)` returns exactly so many bytes."""
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    return pickle.loads(read(length))
