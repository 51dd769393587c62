"""Score completions in a child process: a user's reward function that hangs, crashes or exits takes only that process
with it.

One child is kept warm as long as the reward files do not change; once one has changed, a fresh interpreter reads it, so
nothing of the old code is left. This protects against mistakes, not against malice: the child has all rights of the
user. Runs do not use it (`backend.rewards.runner` calls functions in the trainer's own process); the reward
bench and the command line do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.child_process import ChildEnded, ChildProcess, ChildTimeout, describe_exit, module_command
from backend.rewards.runner.score_one import LoadError
from backend.rewards.runner.user_traceback import UserError
from backend.rewards.sandbox.server import VERB
from backend.spec.faults import Fault, Mistake
from backend.spec.rewards.user_code import code_files

GRACE_S = 3.0
"""How long after its time limit the child may take to report the timeout itself, with the user's line in it. Code that
holds the GIL never lets it."""
EXIT_S = 0.05
"""How long a child may take to end by itself before it is killed."""


@dataclass(slots=True)
class SandboxResult:
    """The result of one function. `scores`: one for each completion, None for no opinion; empty with an `error`."""

    name: str
    seconds: float = 0.0
    scores: list[float | None] = field(default_factory=list)
    logged: dict[str, list[Any]] = field(default_factory=dict)
    error: UserError | None = None
    printed: str = ""


@dataclass(frozen=True, slots=True)
class SandboxTask:
    """Which functions score what: `lines` as `backend.rewards.completion_lines.group_of` reads them."""

    names: Sequence[str]
    lines: Sequence[Mapping[str, Any]]
    file: Path | None = None
    timeout_s: float = 60.0
    max_completion_length: int | None = None

    def load_request(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "file": str(self.file or ""),
            "timeout": self.timeout_s,
            "max_completion_length": self.max_completion_length,
            "groups": list(self.lines),
        }


class SandboxClient:
    """The parent's side. One task at a time; `close` ends the child."""

    def __init__(self) -> None:
        command = module_command("backend.rewards.sandbox.server", VERB)
        # The child enforces the time limit itself and can name the user's line. It is killed only when it does not answer, so
        # a long grace for a normal end would gain nothing.
        self.child = ChildProcess(command, grace_s=EXIT_S)
        self._loaded_files: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def score(
        self,
        task: SandboxTask,
        poll: Callable[[], None] = lambda: None,
        on_function: Callable[[str], None] = lambda name: None,
    ) -> list[SandboxResult]:
        """Score all completions with each function by itself, so that a failing function hides none of the others.

        `poll` is called often and may raise to give up; `on_function` gets each function's name before it is called.
        Raises Mistake where the functions cannot be loaded: LoadError if it is known where the user's file went wrong.
        """
        with self._lock:
            self._restart_if_changed(task)
            try:
                results: list[SandboxResult] = []
                for index, (name, line) in enumerate(self._load(task, poll)):
                    on_function(name)  # before the call: of a function that hangs, the user sees the name
                    results.append(self._score_one(task, index, name, line, poll))
                return results
            except BaseException:
                # A cancelled or failed task leaves nothing behind: the next one begins in a fresh child.
                self.close()
                raise

    def _load(self, task: SandboxTask, poll: Callable[[], None]) -> list[tuple[str, int]]:
        """Name and line of every function, once the child has run the user's file."""
        try:
            reply = self._request(task, {"begin": task.load_request()}, poll)
        except ChildEnded as ended:
            raise Mistake(
                "reward_functions_file", f"{_file_name(task)} {_how(ended)} while it was being loaded."
            ) from ended
        except ChildTimeout:
            sentence = f"{_file_name(task)} {_still_running(task)} while it was being loaded."
            raise Mistake("reward_functions_file", sentence) from None
        if "faults" in reply:
            raise LoadError([Fault(**fault) for fault in reply["faults"]], UserError.from_dict(reply["user_error"]))
        return reply["ready"]

    def _score_one(
        self, task: SandboxTask, index: int, name: str, line: int, poll: Callable[[], None]
    ) -> SandboxResult:
        """One function over all completions. If the previous one ended the child, a new child is started."""
        try:
            # Requests name a function by its index, so a new child has to load all of them first.
            if not self.child.is_started:
                self._load(task, poll)
            reply = self._request(task, {"score": index}, poll)
        except (ChildEnded, ChildTimeout) as failure:
            what = _how(failure) if isinstance(failure, ChildEnded) else _still_running(task)
            of_file = f" of {task.file.name}" if task.file else ""
            sentence = f"The reward function {name}{of_file} {what}."
            return SandboxResult(name, error=UserError(sentence, str(task.file or ""), line))
        scored = reply["scored"]
        error = scored.pop("error")
        return SandboxResult(**scored, error=UserError.from_dict(error) if error else None, printed=reply["printed"])

    def _request(self, task: SandboxTask, message: dict[str, Any], poll: Callable[[], None]) -> dict[str, Any]:
        # Loading runs the user's module, under the same limit as one call.
        return self.child.request(message, task.timeout_s + GRACE_S, poll)

    def _restart_if_changed(self, task: SandboxTask) -> None:
        files = code_files({"reward_functions": list(task.names), "reward_functions_file": str(task.file or "")})
        # Taken before the child reads the files: an edit in between differs from these stamps the next time.
        stamps = tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files)
        if stamps != self._loaded_files:
            self.close()
        self._loaded_files = stamps

    def close(self) -> None:
        self.child.stop()


def _file_name(task: SandboxTask) -> str:
    return task.file.name if task.file else "The process that scores"


def _how(ended: ChildEnded) -> str:
    return f"ended the process it ran in ({describe_exit(ended.exit_code)})"


def _still_running(task: SandboxTask) -> str:
    return f"was still running after {task.timeout_s:g} s (reward_timeout)"
