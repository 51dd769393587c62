"""Score completions for the reward bench and the command line, one function at a time, so that one that fails hides none of the
others.

The process is kept warm as long as the reward files do not change; once one has changed, a fresh interpreter reads it, so nothing of
the old code is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.rewards.catalogue.allowed_code import code_files
from backend.rewards.completion_lines import group_of
from backend.rewards.resolve import FunctionDescription
from backend.rewards.runner.inputs import TrainerState
from backend.rewards.runner.score import samples_of
from backend.rewards.runner.user_traceback import UserCodeError
from backend.rewards.sandbox.answers import Failure
from backend.rewards.sandbox.process import ScoringProcess
from backend.rewards.sandbox.process_scorer import ProcessScorer, RewardSource, failed_on
from backend.types import Group


@dataclass(slots=True)
class SandboxResult:
    """The result of one function. `scores`: one for each completion, None for no opinion; empty with an `error`."""

    name: str
    seconds: float = 0.0
    scores: list[float | None] = field(default_factory=list)
    logged: dict[str, list[Any]] = field(default_factory=dict)
    error: UserCodeError | None = None
    printed: str = ""


@dataclass(frozen=True, slots=True)
class SandboxTask:
    """Which functions score what: `lines` as `backend.rewards.completion_lines.group_of` reads them. `network`: whether functions may
    use it (`reward_network`)."""

    names: Sequence[str]
    lines: Sequence[Mapping[str, Any]]
    file: Path | None = None
    timeout_s: float = 60.0
    max_completion_length: int | None = None
    network: bool = False


class SandboxClient:
    """One task at a time; `close` ends the process."""

    def __init__(self) -> None:
        self.process = ScoringProcess()
        self._scorer: ProcessScorer | None = None
        self._loaded: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def score(
        self,
        task: SandboxTask,
        poll: Callable[[], None] = lambda: None,
        on_function: Callable[[str], None] = lambda name: None,
    ) -> list[SandboxResult]:
        """Score all completions with each function by itself.

        `poll` is called often and may raise to give up; `on_function` gets each function's name before it is called.
        Raises UserError where the functions cannot be loaded (LoadError) or a line holds no completions.
        """
        groups = [group_of(row, index, f"Row {index + 1}") for index, row in enumerate(task.lines)]
        with self._lock:
            scorer = self._scorer_of(task)
            try:
                results: list[SandboxResult] = []
                for index, function in enumerate(scorer.load(poll)[0]):
                    on_function(function.name)  # before the call: of a function that hangs, the user sees the name
                    results.append(_score_one(scorer, groups, index, function, task, poll))
                return results
            except BaseException:
                # A cancelled or failed task leaves nothing behind: the next one begins in a fresh process.
                self.close()
                raise

    def _scorer_of(self, task: SandboxTask) -> ProcessScorer:
        """The scorer of the last task where it is of the same functions, and their files are as they were; else a new one."""
        base = Path.cwd()
        files = code_files({"reward_functions": list(task.names), "reward_functions_file": str(task.file or "")}, base)
        # Taken before the process reads the files: an edit in between differs from these stamps the next time.
        stamps = tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files)
        # What a file keeps in its module is loaded anew for other names, as it always is for a run.
        loaded = (stamps, tuple(task.names), task.file, base, task.network)
        if self._scorer is None or loaded != self._loaded:
            if not (self._loaded and (stamps, task.network) == (self._loaded[0], self._loaded[-1])):
                self.close()
                self.process = ScoringProcess(task.network)
            source = RewardSource([task.names], task.file, base, tuple(files))
            self._scorer = ProcessScorer(source, self.process, task.timeout_s)
            self._loaded = loaded
        return self._scorer

    def close(self) -> None:
        self._scorer, self._loaded = None, ()
        self.process.stop()


def _score_one(
    scorer: ProcessScorer,
    groups: list[Group],
    index: int,
    function: FunctionDescription,
    task: SandboxTask,
    poll: Callable[[], None],
) -> SandboxResult:
    state = TrainerState(max_completion_length=task.max_completion_length)
    scored = scorer.ask(groups, 0, [index], task.timeout_s, state, captures=True, poll=poll)
    if scored.failure is not None:
        return SandboxResult(
            function.name, error=_error(function, scored.failure, groups, task), printed=scored.printed
        )
    return SandboxResult(function.name, scored.seconds[0], scored.scores[0], scored.columns, printed=scored.printed)


def _error(function: FunctionDescription, failure: Failure, groups: list[Group], task: SandboxTask) -> UserCodeError:
    """The failure of the only function that was asked for, with its sentence."""
    sentence = failed_on([function], failure, samples_of(groups), network=task.network).faults[0].sentence
    at = failure.error
    if at is None:
        return UserCodeError(sentence, str(function.file or ""), function.line)
    return UserCodeError(sentence, at.file, at.line, at.frames)
