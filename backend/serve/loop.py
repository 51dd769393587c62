"""The loop of `python -m backend serve`: a question comes in as a JSON line, goes to a thread, and its answer goes out.

    {"id": 7, "ask": "preview", "with": {…}}   {"cancel": 7}
    {"id": 7, "progress": {…}} …, then one of {"id": 7, "answer": …}  {"id": 7, "faults": [{"setting", "sentence"}]}
    {"id": 7, "cancelled": true}; a bug is a fault with a "traceback" beside it, and the loop goes on.

It knows nothing of what is asked: `backend.serve.questions` does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from backend.serve.call import Cancelled, QuestionCall
from backend.serve.questions import QUESTIONS, Question
from backend.spec.events import json_safe
from backend.spec.faults import Fault, Mistake

POOL = 4
"""Threads for what takes moments; most of them wait for a disk or the network."""

Message = dict[str, Any]


class Server:
    """Answers questions. `write` is given whole lines, one at a time, from any thread."""

    def __init__(self, write: Callable[[bytes], None], questions: Mapping[str, Question] = QUESTIONS) -> None:
        self._write, self._questions = write, questions
        self._writing, self._calls = threading.Lock(), dict[int, QuestionCall]()
        self._pool = ThreadPoolExecutor(POOL, thread_name_prefix="question")
        self._model = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._lasting: list[threading.Thread] = []

    def serve(self, lines: Iterable[bytes]) -> None:
        """Answer until the lines end and everything that was asked is answered."""
        for line in lines:
            if line.strip():
                self.hear(line)
        self._pool.shutdown()
        self._model.shutdown()
        for thread in self._lasting:
            thread.join()

    def hear(self, line: bytes) -> None:
        """Take one line in; the answer comes when it comes."""
        try:
            said = json.loads(line)
            if "cancel" in said:
                self._cancel(said["cancel"])
            else:
                self._ask(int(said["id"]), str(said["ask"]), dict(said.get("with") or {}))
        except (ValueError, TypeError, KeyError):
            self._say({"id": None, "faults": [Fault("", "A line came in that is not a question.").to_dict()]})

    def _ask(self, number: int, name: str, asked: dict[str, Any]) -> None:
        question = self._questions.get(name)
        if question is None:
            self._say({"id": number, "faults": [Fault("", f"There is no question {name}.").to_dict()]})
            return
        call = QuestionCall(lambda progress: self._say({"id": number, "progress": progress}))
        self._calls[number] = call
        self._start(question, lambda: self._answer(number, question, asked, call))

    def _start(self, question: Question, work: Callable[[], None]) -> None:
        if question.lasting:
            self._lasting = [thread for thread in self._lasting if thread.is_alive()]
            self._lasting.append(threading.Thread(target=work, daemon=True))
            self._lasting[-1].start()
        else:
            (self._model if question.on_model_thread else self._pool).submit(work)

    def _cancel(self, number: int) -> None:
        if call := self._calls.get(number):  # answered already otherwise
            call.take_back()

    def _answer(self, number: int, question: Question, asked: dict[str, Any], call: QuestionCall) -> None:
        said = _outcome(question, asked, call)
        self._calls.pop(number, None)
        self._say({"id": number, **said})

    def _say(self, message: Message) -> None:
        # A lone surrogate, as broken text may hold, has no UTF-8.
        line = json.dumps(json_safe(message), ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
        with self._writing:
            self._write(line)


def _outcome(question: Question, asked: dict[str, Any], call: QuestionCall) -> Message:
    """What is said of a question in the end. A bug is told with its traceback, and answered all the same."""
    try:
        call.check()  # it may have waited for a thread, and be wanted no longer
        answer = json_safe(question.handler()(asked, call))
        json.dumps(answer, allow_nan=False)
        return {"answer": answer}
    except Cancelled:
        return {"cancelled": True}
    except Mistake as mistake:
        return {"faults": [fault.to_dict() for fault in mistake.faults]}
    except Exception as error:
        told = f"Something went wrong inside GRPO Studio ({type(error).__name__}: {error})."
        return {"faults": [Fault("", told).to_dict()], "traceback": traceback.format_exc()}


def run() -> None:
    """Serve stdin and stdout of this process until stdin ends. Nothing but answers reaches stdout: what libraries print
    there goes to stderr."""
    out = _claim_stdout()
    Server(lambda line: _put(out, line)).serve(sys.stdin.buffer)
    out.flush()


def _claim_stdout() -> BinaryIO:
    """stdout for ourselves; file descriptor 1, which C code prints to as well, becomes stderr."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(ours, "wb")


def _put(out: BinaryIO, line: bytes) -> None:
    try:
        out.write(line)
        out.flush()
    except BrokenPipeError:  # the window is gone, and nobody will read an answer
        os._exit(0)
