"""The sandbox's child process: it loads reward functions and calls them, one at a time, for
`backend.rewards.sandbox.client`.

Requests and answers (`backend.child_process`):
    {"begin": {"names", "file", "timeout", "max_completion_length"?, "groups": […]}}
                   → {"ready": [[name, line of its def], …]} or {"faults": […], "user_error": {…}}
    {"score": 2}   → {"scored": {…}, "printed": "…"}, the third function over all groups
Text that Python code prints while it scores comes back under "printed"; all other output goes to stderr.
"""

from __future__ import annotations

import contextlib
import io
import math
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend import child_process
from backend.rewards.completion_lines import group_of
from backend.rewards.resolve import RewardFunction
from backend.rewards.runner.inputs import TrainerState
from backend.rewards.runner.score_one import LoadError, load, score_one
from backend.types import Group

VERB = "scorer"
"""The argument that makes a bundled app's executable this child, where there is no Python to run a module with."""
ALARM_S = 10.0
"""Seconds past the time limit after which SIGALRM ends this process. The parent kills it earlier, unless the parent has
died: code that holds the GIL would then run for ever."""
PRINTED_TAIL = 2000
"""Characters of a function's printed output that are sent back, from its end."""


class SandboxServer:
    """State of the process between two requests: the groups, and the functions that were loaded."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.functions: list[RewardFunction] = []
        self.timeout, self.state = 60.0, TrainerState()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "begin" in request:
            self.timeout = float(request["begin"]["timeout"])
        # An alarm of the kernel: unlike a timer thread it also ends code that never gives the GIL back.
        signal.alarm(math.ceil(self.timeout + ALARM_S))
        try:
            return self._load(request["begin"]) if "begin" in request else self._score(int(request["score"]))
        finally:
            signal.alarm(0)

    def _load(self, task: dict[str, Any]) -> dict[str, Any]:
        self.state = TrainerState(max_completion_length=task.get("max_completion_length"))
        self.groups = [group_of(row, index, f"Row {index + 1}") for index, row in enumerate(task["groups"])]
        try:
            self.functions = load(task["names"], Path(task["file"]) if task.get("file") else None, self.timeout)
        except LoadError as error:
            return {"faults": [fault.to_dict() for fault in error.faults], "user_error": error.user_error.to_dict()}
        return {"ready": [(function.name, function.line or 0) for function in self.functions]}

    def _score(self, index: int) -> dict[str, Any]:
        with _captured_prints() as printed:
            scored = score_one(self.groups, self.functions[index], self.timeout, self.state)
        return {"scored": asdict(scored), "printed": printed.getvalue()[-PRINTED_TAIL:]}


def main() -> None:
    """Answer until stdin ends."""
    # The default action ends the process without running any bytecode. Set, because exec keeps a signal ignored that the
    # parent had ignored.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    out = child_process.claim_stdout()
    server = SandboxServer()
    for request in child_process.requests():
        child_process.answer(out, server.answer(request))


@contextlib.contextmanager
def _captured_prints() -> Iterator[io.StringIO]:
    printed = io.StringIO()  # for Python's prints only; C code writes to descriptor 1, which `claim_stdout` made stderr
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield printed


if __name__ == "__main__":
    main()
