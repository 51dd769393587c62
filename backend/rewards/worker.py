"""The reward worker: runs reward files and functions on request of `worker_process`.

Stdin: pickles, first what to confine and the file for stacks, then pairs of a random prefix and a request of
`backend.rewards.scoring`. Stdout: lines of that prefix and JSON: marks [function index, whether its time begins], then
the answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from backend.rewards.calls import Caller
from backend.rewards.confinement.confine import INSIDE, confine
from backend.rewards.confinement.guard import guard
from backend.rewards.errors import describe_error
from backend.rewards.scoring import FunctionHost, LoadRequest

LOST_PIPE = 97  # exit code for closed pipes
SPOILED = 98  # exit code if user code broke our code in the worker

_exit, _write, _getpid, _load = os._exit, os.write, os.getpid, pickle.load  # bound before user code can replace them
_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, default=str).encode


def main(arguments: Sequence[str] = ()) -> NoReturn:
    """Take over stdin and stdout, and answer until the parent closes its end."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)  # programs that user code starts do not inherit them
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    guard(requests.fileno())  # returns in the process that is guarded; both and what they start end with the parent
    pid, last, prefix = os.getpid(), "", b""

    def send(message: str) -> None:
        nonlocal last
        if message == last:
            return
        last = message
        if _getpid() != pid:  # a fork
            _exit(LOST_PIPE)
        rest = memoryview(prefix + message.encode("ascii") + b"\n")
        try:
            while rest:
                rest = rest[_write(answers, rest) :]
        except OSError:  # user code has closed it
            _exit(LOST_PIPE)

    def mark(index: int, begins: bool = True) -> None:
        if begins and limit_s:  # a function that hangs leaves its stack
            faulthandler.dump_traceback_later(limit_s, file=stacks)
        send(f"[{index}, {'true' if begins else 'false'}]")

    caller, limit_s, stacks, host = Caller(mark), 0.0, 2, None
    try:
        network, secrets, stacks = _load(requests)
        os.set_inheritable(stacks, False)
        confinement = confine([Path.cwd()], network, secrets)
        if confinement.files:
            os.environ[INSIDE] = "1"
        faulthandler.enable(stacks)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
        host = FunctionHost(caller, confinement.sentences())
        while True:
            try:
                prefix, request = _load(requests)
            except OSError:
                _exit(LOST_PIPE)
            last, limit_s = "", request.timeout_s
            if isinstance(request, LoadRequest):
                mark(0)
            answer = asdict(host.ask(request))
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            send(_encode(answer))
    except EOFError:
        (host or caller).close()
        sys.exit()  # a user's `atexit` functions run now, and files are flushed
    except BaseException as error:
        try:
            _write(2, f"The process of the reward functions gave up: {describe_error(error, None)}.\n".encode())
        finally:
            _exit(SPOILED)


if __name__ == "__main__":
    main()
