"""The reward worker: runs reward files and functions on request of `worker_process`.

Requests: {"load": key, "source", "timeout"}, {"score": key, "stage", "indices", "groups", "timeout", "state",
"captures"}, {"map": key, "function", "rows", "timeout"}. Answers: fields of `scoring.Loaded`, `Scored` or `Mapped`, or
{"problems", "failure"}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from backend.rewards.calls import Caller
from backend.rewards.confinement.confine import confine, tell_children
from backend.rewards.confinement.guard import guard
from backend.rewards.errors import LoadError, describe_error
from backend.rewards.scoring import FunctionHost
from backend.rewards.worker_process import LOST_PIPE, SPOILED, frame, read_request, unpacked

_exit, _write, _getpid = os._exit, os.write, os.getpid  # bound before user code can replace them
_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, default=str).encode


class _PipeLostError(Exception):
    """User code closed a pipe, or this is a fork."""


class Pipes:
    """The worker's pipe ends."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._pid = os.getpid()
        self._mark = (-1, False)
        for file in (requests, answers):  # programs that user code starts do not inherit them
            os.set_inheritable(file, False)

    def receive(self, read: Any = os.read) -> Any:
        """The next request. Raises EOFError at the end, and _PipeLostError."""

        def exactly(count: int) -> bytes:
            pieces: list[bytes] = []
            while count:
                try:
                    piece = read(self._requests, min(count, 1 << 20))
                except OSError:
                    raise _PipeLostError from None
                if not piece:
                    raise EOFError
                pieces.append(piece)
                count -= len(piece)
            return b"".join(pieces)

        return read_request(exactly)

    def mark(self, index: int, is_async: bool) -> None:
        """Report the running function's index; −1 for none."""
        if self._mark != (index, is_async):
            self._mark = (index, is_async)
            self._send(f"[{index}, {'true' if is_async else 'false'}]".encode())

    def answer(self, answer: dict[str, Any]) -> None:
        """Raises _PipeLostError."""
        self._mark = (-1, False)
        self._send(_encode(answer).encode("ascii"))

    def _send(self, message: bytes) -> None:
        if _getpid() != self._pid:
            raise _PipeLostError
        rest = memoryview(frame(message))
        try:
            while rest:
                rest = rest[_write(self._answers, rest) :]
        except OSError:
            raise _PipeLostError from None


def answer_to(request: dict[str, Any], host: FunctionHost, pipes: Pipes) -> dict[str, Any]:
    if "load" in request:
        pipes.mark(0, False)
        try:
            return asdict(host.load(request["load"], request["source"], request["timeout"]))
        except LoadError as error:
            problems = [(problem.setting, problem.sentence) for problem in error.faults]
            return {"problems": problems, "failure": asdict(error.failure)}
    if "map" in request:
        return asdict(host.map_rows(request["map"], request["function"], request["rows"], request["timeout"]))
    groups = unpacked(request["groups"])
    return asdict(
        host.score(
            request["score"],
            request["stage"],
            request["indices"],
            groups,
            request["timeout"],
            request["state"],
            request["captures"],
        )
    )


def serve(pipes: Pipes, host: FunctionHost) -> NoReturn:
    """Answer until the parent closes its end."""
    try:
        while True:
            answer = answer_to(pipes.receive(), host, pipes)
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            pipes.answer(answer)
    except EOFError:
        host.close()
        sys.exit()  # a user's `atexit` functions run now, and files are flushed
    except _PipeLostError:
        _exit(LOST_PIPE)
    except BaseException as error:
        try:
            _write(2, f"The process of the reward functions gave up: {describe_error(error, None)}.\n".encode())
        finally:
            _exit(SPOILED)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """`arguments`: descriptors of requests and answers."""
    requests, answers = map(int, sys.argv[1:] if arguments is None else arguments)
    guard(requests)  # returns in the process that is guarded; both end with the parent, and so does what they start
    pipes = Pipes(requests, answers)
    try:
        begin = pipes.receive()
    except EOFError:
        sys.exit()
    confinement = confine([Path.cwd()], begin["network"], [Path(place) for place in begin["secrets"]])
    tell_children(confinement)
    faulthandler.enable()  # a crash leaves the line of Python in log.txt
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    serve(pipes, FunctionHost(Caller(pipes.mark), confinement.sentences()))


if __name__ == "__main__":
    main()
