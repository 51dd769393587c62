"""The process that runs programs, as reward functions ask it: started with the first request, kept until this process ends.

It is a process of its own because it forks: this one may have threads, and holds the tests' expected values, which no program may read.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from backend.utils.child_process import ChildEnded, ChildProcess, ChildTimeout, module_command

VERB = "programs"
"""The argument that makes a bundled app's executable this child, where there is no Python to run a module with."""
GRACE_S = 5.0
"""How long after its deadline a request may take to be answered."""

Task = Mapping[str, Any]
"""See `backend.rewards.programs.server`."""
TaskResult = Mapping[str, Any]


class ProgramRunner:
    """`run` may be called by several threads."""

    def __init__(self) -> None:
        self.child = ChildProcess(module_command("backend.rewards.programs.server", VERB), grace_s=1.0)
        self._lock = threading.Lock()
        self._not_confined = ""

    def run(
        self, programs: Sequence[Sequence[Task]], *, seconds: float, memory_mb: int, deadline_s: float
    ) -> list[list[TaskResult]] | None:
        """The results of each program's tasks, as far as they were run; None where the process was lost. Raises PermissionError where this
        system cannot keep a program from a person's files."""
        request = {
            "programs": programs, "seconds": seconds, "memory_mb": memory_mb, "deadline_s": deadline_s, "parallel": _processors(),
        }  # fmt: skip
        with self._lock:
            try:
                if not self.child.is_started:
                    self.child.start()
                    self._not_confined = self.child.receive()["confined"]
                if self._not_confined:
                    raise PermissionError(self._not_confined)
                return self.child.request(request, timeout_s=deadline_s + GRACE_S)["programs"]
            except (ChildEnded, ChildTimeout):
                return None

    def close(self) -> None:
        self.child.stop()


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # a Mac
        return os.cpu_count() or 1


runner = ProgramRunner()
atexit.register(runner.close)
