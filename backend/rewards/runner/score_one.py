"""Scoring for somebody who looks at it: every function by itself, so that one that fails hides none of the others.

The functions are called exactly as a run calls them (`backend.rewards.runner.score`); a run would stop at the first failure.
Advantages are none of its business: they take arrays.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.rewards.resolve import RewardFunction, resolve
from backend.rewards.runner.inputs import TrainerState
from backend.rewards.runner.score import RewardError, score
from backend.rewards.runner.timeout import CallFailed, TimeUp, call_within
from backend.rewards.runner.user_traceback import Blame, blame
from backend.spec.faults import Mistake
from backend.spec.rewards.catalog import locate_reward_file, parse_reward_file
from backend.types import Group


class Unloadable(Mistake):
    """The functions cannot be had at all; `blame` says where the file went wrong."""

    def __init__(self, mistake: Mistake, found: Blame) -> None:
        super().__init__(mistake.faults)
        self.blame = found


@dataclass(slots=True)
class FunctionScores:
    """What one function gave: a score for each completion of all groups in order, or `error` and no scores."""

    name: str
    seconds: float = 0.0
    scores: list[float | None] = field(default_factory=list)
    logged: dict[str, list[Any]] = field(default_factory=dict)
    error: Blame | None = None


def load(names: Sequence[str], file: Path | None, timeout_s: float) -> list[RewardFunction]:
    """The functions behind `names`; the person's file is run, within the time limit. Raises Unloadable."""
    linecache.checkcache()
    try:
        return call_within(timeout_s, lambda: resolve(list(names), file), lambda found: found)
    except TimeUp:
        where = file.name if file else "A reward file"
        mistake = Mistake("reward_functions_file", f"{where} was still running after {timeout_s:g} s (reward_timeout).")
        raise Unloadable(mistake, blame(mistake.faults[0].sentence, None, file)) from None
    except CallFailed as failure:
        cause = failure.__cause__
        if not isinstance(cause, Mistake):
            raise
        file = file or _named_file(names)
        raise Unloadable(cause, blame(cause.faults[0].sentence, cause.__cause__, file)) from cause


def _named_file(names: Sequence[str]) -> Path | None:
    """The file before `::`, where just one is named."""
    files = {name.partition("::")[0].strip() for name in names if "::" in name}
    return locate_reward_file(files.pop()).resolve() if len(files) == 1 else None


def score_one(
    groups: list[Group], function: RewardFunction, timeout_s: float, state: TrainerState | None = None
) -> FunctionScores:
    """One function over all completions, as in a step of a run. What fails is told in `error`."""
    try:
        report = score(groups, [function], [1.0], timeout_s, state)
    except RewardError as error:
        sentence = error.faults[0].sentence
        return FunctionScores(function.name, error=blame(sentence, error.__cause__, function.file, function.line or 0))
    given = [one.scores[function.name] for group in groups for one in group.completions]
    return FunctionScores(function.name, report.seconds.get(function.name, 0.0), given, report.columns)


def syntax_of(file: Path) -> Blame | None:
    """What is wrong with the text of a file, without running it; None where nothing is."""
    try:
        parse_reward_file(file)
    except Mistake as mistake:
        return blame(mistake.faults[0].sentence, mistake.__cause__, file)
    return None
