"""Score completions with one function at a time for the reward bench, so that a failing function hides none of the others.

A run calls functions in the same way (`backend.rewards.runner.score`), but stops at the first failure; here a failure is
part of the result.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.rewards.resolve import RewardFunction, resolve
from backend.rewards.runner.inputs import TrainerState
from backend.rewards.runner.score import RewardError, score
from backend.rewards.runner.timeout import CallFailed, CallTimeout, call_with_timeout
from backend.rewards.runner.user_traceback import UserError
from backend.spec.faults import Fault, Mistake
from backend.spec.rewards.catalog import locate_reward_file
from backend.types import Group


class LoadError(Mistake):
    """The reward functions cannot be loaded; `user_error` says where the user's file went wrong."""

    def __init__(self, faults: Iterable[Fault], user_error: UserError) -> None:
        super().__init__(faults)
        self.user_error = user_error


@dataclass(slots=True)
class FunctionScores:
    """The result of one function: a score for each completion of all groups in order, or an `error` and no scores."""

    name: str
    seconds: float = 0.0
    scores: list[float | None] = field(default_factory=list)
    logged: dict[str, list[Any]] = field(default_factory=dict)
    error: UserError | None = None


def load(names: Sequence[str], file: Path | None, timeout_s: float) -> list[RewardFunction]:
    """The functions behind `names`; the user's file is run, within the time limit. Raises LoadError."""
    linecache.checkcache()
    try:
        return call_with_timeout(timeout_s, lambda: resolve(list(names), file), lambda functions: functions)
    except CallTimeout:
        file_name = file.name if file else "A reward file"
        sentence = f"{file_name} was still running after {timeout_s:g} s (reward_timeout)."
        raise LoadError([Fault("reward_functions_file", sentence)], UserError.of(sentence, None, file)) from None
    except CallFailed as failure:
        mistake = failure.__cause__
        if not isinstance(mistake, Mistake):
            raise
        user_error = UserError.of(mistake.faults[0].sentence, mistake.__cause__, file or _only_named_file(names))
        raise LoadError(mistake.faults, user_error) from mistake


def _only_named_file(names: Sequence[str]) -> Path | None:
    """The file before `::`, where the entries name just one."""
    files = {name.partition("::")[0].strip() for name in names if "::" in name}
    return locate_reward_file(files.pop()).resolve() if len(files) == 1 else None


def score_one(
    groups: list[Group], function: RewardFunction, timeout_s: float, state: TrainerState | None = None
) -> FunctionScores:
    """Score all completions with one function, as a step of a run does. A failure is returned as `error`."""
    try:
        report = score(groups, [function], [1.0], timeout_s, state)
    except RewardError as error:
        sentence, line = error.faults[0].sentence, function.line or 0
        return FunctionScores(function.name, error=UserError.of(sentence, error.__cause__, function.file, line))
    scores = [completion.scores[function.name] for group in groups for completion in group.completions]
    return FunctionScores(function.name, report.seconds.get(function.name, 0.0), scores, report.columns)
