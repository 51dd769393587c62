"""The loop of `python -m backend serve`, and the questions that the window may ask.

They come in as JSON lines on stdin, answers go out in any order. The other end is `app.state.processes`.

    in:   {"id": 7, "ask": "preview", "with": {…}}   and   {"cancel": 7}
    out:  {"id": 7, "progress": {…}} any number of times, then exactly one of
          {"id": 7, "answer": …}   {"id": 7, "faults": [{"setting", "sentence"}]}   {"id": 7, "cancelled": true}

A handler is `def name(call: QuestionCall, …)` with the values of "with" as its arguments, in a module that is imported
when it is first asked. It returns JSON values or raises UserError; any other exception is answered as a fault with a
"traceback". It may cache costly results, keyed by everything that they depend on (a path and its modification time).
"""

import atexit
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backend.models.tokenizers import import_mlx_lm
from backend.trainer.machine import fault_of_gpu
from backend.utils.child_process import claim_stdout, json_line
from backend.utils.disk import fault_of
from backend.utils.errors import ConfigProblem, UserError


class Cancelled(BaseException):
    """The question was cancelled. A BaseException, so that it does not pass for an error of the user's data."""


class QuestionCall:
    """Handed to every handler. `report` sends progress."""

    def __init__(self, report: Callable[[dict[str, Any]], None] = lambda progress: None) -> None:
        self.report = report
        self._cancelled = threading.Event()

    def check(self) -> None:
        """Raise Cancelled once the question was cancelled. Call it between two pieces of work."""
        if self._cancelled.is_set():
            raise Cancelled

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until the question is cancelled. Raises Cancelled."""
        if self._cancelled.wait(seconds):
            raise Cancelled

    def cancel(self) -> None:
        """Called by the server, from another thread than the handler's."""
        self._cancelled.set()


POOLS = {"quick": 4, "model": 1, "long": 16}
"""Pool → how many threads it has. Most of the quick ones wait for a disk or the network. To the one of `model` belong
mlx's arrays and random state. What may take minutes is `long`, so that quick questions never wait for it."""


_NAMES = {  # (module of this package, pool) → its questions
    ("hub_questions", "quick"): "models reward_models datasets model_facts hub_search hub_files discard hub_login",
    ("hub_questions", "model"): "import_adapter",
    ("hub_questions", "long"): "download check_machines hub_account hub_hardware",
    ("reward_questions", "quick"): "score run_completions read_completions reward_cases tools judge_servers judge_key",
    ("reward_questions", "model"): "sample judge_agreement",
    ("dataset_questions", "quick"): "preview_rows preview_row",
    ("dataset_questions", "long"): "preview preview_choices preview_counts preview_variety preview_difficulty",
    ("chat_questions", "quick"): "chat_row",
    ("chat_questions", "model"): "chat_load chat_reply",
}
QUESTIONS = {name: (f"backend.serve.{at}", pool) for (at, pool), names in _NAMES.items() for name in names.split()}
"""Question → (module, pool)."""


def handler(name: str, module: str, pool: str = "quick") -> Callable[..., Any]:
    if pool == "model":
        import_mlx_lm()  # a thread of another pool may be loading a tokenizer with it
    return getattr(importlib.import_module(module), name)


class Server:
    """Answers questions. `write` gets whole lines, one at a time, from any thread."""

    def __init__(self, write: Callable[[str], None], questions: Mapping[str, tuple[str, str]] = QUESTIONS) -> None:
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
        message = json.loads(line)
        if "cancel" in message:
            if call := self._calls.get(message["cancel"]):  # None: it has been answered
                call.cancel()
            return
        number, name, request = message["id"], message["ask"], message.get("with") or {}
        module, pool = self._questions.get(name, ("", "quick"))

        def reply(**about: Any) -> str:
            return json_line({"id": number, **about})

        call = self._calls[number] = QuestionCall(lambda progress: self._send(reply(progress=progress)))

        def work() -> None:
            try:
                call.check()  # it may have been cancelled while it waited for a thread
                if not module:
                    raise UserError("", f"There is no question {name}.")
                ending = reply(answer=handler(name, module, pool)(call, **request))
            except Cancelled:
                ending = reply(cancelled=True)
            except Exception as error:
                known = error if isinstance(error, UserError) else fault_of(error) or fault_of_gpu(error)
                sentence = f"Something went wrong inside GRPO Studio ({type(error).__name__}: {error})."
                faults = known.faults if known is not None else [ConfigProblem("", sentence)]
                bug = {"traceback": traceback.format_exc()} if known is None else {}
                ending = reply(faults=[problem.to_dict() for problem in faults], **bug)
            self._calls.pop(number, None)
            self._send(ending)

        self._pools[pool].submit(work)

    def _send(self, line: str) -> None:
        with self._write_lock:
            self._write(line)


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
