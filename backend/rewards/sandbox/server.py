"""The process that scores for the bench: a person's code may hang it, crash it or end it, and nothing else suffers.

It speaks lines of JSON on stdin and stdout, an answer to each:
    {"begin": {"names", "file", "timeout", "max_completion_length"?, "groups": […]}}
                   → {"ready": [[name, line of its def], …]} or {"faults": […], "blame": {…}}
    {"score": 2}   → {"scored": {…}}, the third function over all groups
What a person's code prints goes to neither: its end is told with the scores. It ends when its input does.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from backend.rewards.completion_lines import group_of
from backend.rewards.resolve import RewardFunction
from backend.rewards.runner.inputs import TrainerState
from backend.rewards.runner.score_one import Unloadable, load, score_one
from backend.spec.events import json_safe
from backend.types import Group

VERB = "scorer"
"""What a bundled app's executable is asked for, where there is no Python to run a module with."""
FUSE_S = 10.0
"""Past its time limit, whatever the process is doing, the system ends it: its parent may be gone, and code that holds
the interpreter's lock would go on for ever."""
TAIL = 2000
"""Characters of what a function printed that are told."""


class SandboxServer:
    """What the process holds between two lines: the groups, and the functions that were loaded."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.functions: list[RewardFunction] = []
        self.timeout, self.state = 60.0, TrainerState()

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "begin" in asked:
            self.timeout = float(asked["begin"]["timeout"])
        signal.alarm(math.ceil(self.timeout + FUSE_S))
        try:
            return self._begin(asked["begin"]) if "begin" in asked else self._score(int(asked["score"]))
        finally:
            signal.alarm(0)

    def _begin(self, about: dict[str, Any]) -> dict[str, Any]:
        self.state = TrainerState(max_completion_length=about.get("max_completion_length"))
        self.groups = [group_of(row, place, f"Row {place + 1}") for place, row in enumerate(about["groups"])]
        try:
            self.functions = load(about["names"], Path(about["file"]) if about.get("file") else None, self.timeout)
        except Unloadable as failure:
            return {"faults": [fault.to_dict() for fault in failure.faults], "blame": failure.blame.to_dict()}
        return {"ready": [(function.name, function.line or 0) for function in self.functions]}

    def _score(self, place: int) -> dict[str, Any]:
        with _overheard() as said:
            scored = score_one(self.groups, self.functions[place], self.timeout, self.state)
        return {"scored": asdict(scored), "printed": said.getvalue()[-TAIL:]}


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whose default is to end the process
    out = _claim_stdout()
    bench = SandboxServer()
    for line in sys.stdin:
        _say(out, bench.answer(json.loads(line)))


def _claim_stdout() -> TextIO:
    """stdout for answers alone; what anybody prints, C code too, goes to stderr."""
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(ours, "w", encoding="utf-8", errors="replace")


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(json_safe(answer), ensure_ascii=False, default=str) + "\n")
    out.flush()


@contextlib.contextmanager
def _overheard() -> Any:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said


if __name__ == "__main__":
    main()
