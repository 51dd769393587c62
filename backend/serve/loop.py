"""The loop of `python -m backend serve`: questions come in as JSON lines on stdin, answers go out in any order.

    in:   {"id": 7, "ask": "preview", "with": {…}}   and   {"cancel": 7}
    out:  {"id": 7, "progress": {…}} any number of times, then exactly one of
          {"id": 7, "answer": …}   {"id": 7, "faults": [{"setting", "sentence"}]}   {"id": 7, "cancelled": true}

An exception in a handler is answered as a fault with a "traceback", and the loop continues. `backend.serve.questions`
lists the questions; the other end is `app.state.processes`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backend.serve.questions import POOLS, QUESTIONS, Cancelled, Question, QuestionCall
from backend.trainer.machine import fault_of_gpu
from backend.utils.child_process import claim_stdout, json_line
from backend.utils.disk import fault_of
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import json_safe

Message = dict[str, Any]


class Server:
    """Answers questions. `write` gets whole lines, one at a time, from any thread."""

    def __init__(self, write: Callable[[str], None], questions: Mapping[str, Question] = QUESTIONS) -> None:
        self._write, self._questions = write, questions
        self._write_lock, self._calls = threading.Lock(), dict[int, QuestionCall]()
        self._pools = {name: ThreadPoolExecutor(threads, name) for name, threads in POOLS.items()}

    def serve(self, lines: Iterable[bytes]) -> None:
        """Answer until the lines end and every question has its answer."""
        for line in lines:
            if line.strip():
                self.receive(line)
        for pool in self._pools.values():
            pool.shutdown()

    def receive(self, line: bytes) -> None:
        """Start to answer one line; does not wait for the answer."""
        try:
            message = json.loads(line)
            if "cancel" in message:
                if call := self._calls.get(message["cancel"]):  # None: it has been answered
                    call.cancel()
                return
            number, name, request = int(message["id"]), str(message["ask"]), dict(message.get("with") or {})
        except (ValueError, TypeError, KeyError):
            self._send({"id": None, "faults": [ConfigProblem("", "A line came in that is not a question.").to_dict()]})
            return
        question = self._questions.get(name)
        if question is None:
            self._send({"id": number, "faults": [ConfigProblem("", f"There is no question {name}.").to_dict()]})
            return
        call = self._calls[number] = QuestionCall(lambda progress: self._send({"id": number, "progress": progress}))

        def work() -> None:
            ending = _run_handler(question, request, call)
            self._calls.pop(number, None)
            self._send({"id": number, **ending})

        self._pools[question.pool].submit(work)

    def _send(self, message: Message) -> None:
        line = json_line(message)
        with self._write_lock:
            self._write(line)


def _run_handler(question: Question, request: dict[str, Any], call: QuestionCall) -> Message:
    try:
        call.check()  # it may have been cancelled while it waited for a thread
        answer = json_safe(question.handler()(request, call))
        json.dumps(answer, allow_nan=False)
        return {"answer": answer}
    except Cancelled:
        return {"cancelled": True}
    except Exception as error:
        known = error if isinstance(error, UserError) else fault_of(error) or fault_of_gpu(error)
        if known is not None:
            return {"faults": [problem.to_dict() for problem in known.faults]}
        sentence = f"Something went wrong inside GRPO Studio ({type(error).__name__}: {error})."
        return {"faults": [ConfigProblem("", sentence).to_dict()], "traceback": traceback.format_exc()}


def run() -> None:
    """Answer the lines of this process's stdin until it ends; only answers reach stdout."""
    out = claim_stdout()

    def write(line: str) -> None:
        try:
            out.write(line)
            out.flush()
        except BrokenPipeError:  # the window has ended, so no answer would be read
            os._exit(0)

    Server(write).serve(sys.stdin.buffer)
    out.flush()
    atexit._run_exitfuncs()
    os._exit(0)  # mlx's threads, which began in ours, often abort a process that unloads its libraries
