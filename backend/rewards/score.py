"""Score a step's completions: each function once, over all completions of all groups together.

It decides nothing about training. It fills in `scores` and `reward`, or it stops the run: a function that raises,
hangs, or returns anything but a finite number or None for each completion is a mistake to mend, never a 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from backend.nouns import Completion, Group, Problem
from backend.rewards.compat import library
from backend.rewards.resolve import INPUTS, RewardFunction
from backend.rewards.words import describe, excerpt
from backend.rewards.worker import CallFailed, TimeUp, call_within
from backend.spec.catalog import nearest
from backend.spec.faults import Mistake

Scores = list[float | None]
Sample = tuple[Problem, Completion]


class RewardError(Mistake):
    """A reward function failed on real completions; one sentence on `reward_functions` says which, how and on what."""


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """`seconds` each function took, by name; `unscored` completions on which no function had an opinion."""

    seconds: dict[str, float]
    unscored: int


def score(groups: list[Group], functions: list[RewardFunction], weights: list[float], timeout_s: float) -> ScoreReport:
    """Fill every completion's `scores` (by function name, None where it had no opinion) and `reward`.

    `reward` is Σ w·score over the functions that are not None, and None if all are. `weights` has one number for each
    function, `timeout_s` is the limit of one call in seconds. Raises RewardError; no completion is changed then.
    """
    samples = [(group.problem, completion) for group in groups for completion in group.completions]
    offered = _offered(samples)
    seconds: dict[str, float] = {}
    scores: list[Scores] = []
    for function in functions if samples else []:
        began = time.perf_counter()
        scores.append(_scores(function, samples, offered, timeout_s))
        seconds[function.name] = time.perf_counter() - began
    rows = zip(*scores, strict=True)
    for (_, completion), row in zip(samples, rows, strict=True):
        completion.scores = {function.name: x for function, x in zip(functions, row, strict=True)}
        completion.reward = total_reward(row, weights)
    return ScoreReport(seconds, sum(completion.reward is None for _, completion in samples))


def total_reward(scores: Iterable[float | None], weights: Iterable[float]) -> float | None:
    """Σ w·score over the scores that are not None; None if all are."""
    counted = [w * x for w, x in zip(weights, scores, strict=True) if x is not None]
    return sum(counted) if counted else None


def _offered(samples: list[Sample]) -> dict[str, list[Any] | None]:
    """Everything a function may ask for by name, one entry a sample: our inputs, then the dataset's columns."""
    types: list[Any] = [problem.type for problem, _ in samples]
    ids: list[Any] = [list(completion.tokens) for _, completion in samples]
    offered: dict[str, list[Any] | None] = {
        "prompts": [problem.prompt for problem, _ in samples],
        "completions": [completion.text for _, completion in samples],
        "answer": [problem.answer for problem, _ in samples],
        "types": types if any(each is not None for each in types) else None,
        "completion_ids": ids,
        "completions_ids": ids,
    }
    columns = dict.fromkeys(name for problem, _ in samples for name in problem.row if name not in INPUTS)
    offered.update({name: [problem.row.get(name) for problem, _ in samples] for name in columns})
    return offered


def _scores(function: RewardFunction, samples: list[Sample], offered: dict[str, Any], timeout_s: float) -> Scores:
    """One function's scores of all samples."""
    for name in function.arguments.lacking(offered):
        raise _error(function, f"asks for {name}, which is {_not_offered(name, offered)}", samples[0])
    # Each function gets lists of its own: one that sorts its list must not shuffle the next one's.
    given = {name: value and list(value) for name, value in function.arguments.choose(offered).items()}
    try:
        with library(function.home.functions) if function.home else nullcontext():
            return call_within(timeout_s, lambda: function.call(**given), lambda value: _read(value, len(samples)))
    except TimeUp:
        raise _error(function, f"was still running after {timeout_s:g} s (reward_timeout)", samples[0]) from None
    except CallFailed as failure:
        cause = failure.__cause__ or failure
        if isinstance(cause, _Unusable):
            raise _error(function, f"returned {cause}", samples[cause.index]) from None
        raise _error(function, f"raised {describe(cause, function.file)}", samples[0]) from cause


def _not_offered(name: str, offered: Iterable[str]) -> str:
    close = nearest(name, offered)
    hint = f"; the nearest is {close}" if close else ""
    return f"neither an input of reward functions nor a column of the dataset{hint}"


class _Unusable(Exception):
    """What a function returned cannot be taken for scores; `index` is the first completion that this shows on."""

    def __init__(self, what: str, index: int = 0) -> None:
        super().__init__(what)
        self.index = index


def _read(returned: Any, count: int) -> Scores:
    """What a function returned, as `count` numbers or None. Lists, tuples, generators and arrays of any library."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        kind = "None" if returned is None else type(returned).__name__
        raise _Unusable(f"{kind} where a list of {count} scores was expected")
    values = list(values)
    if len(values) != count:
        raise _Unusable(f"{len(values)} scores for {count} completions")
    return [_number(value, index) for index, value in enumerate(values)]


def _number(value: Any, index: int) -> float | None:
    if value is None:
        return None
    number = _as_float(value)
    if number is None:
        raise _Unusable(f"{excerpt(repr(value))} ({type(value).__name__}) as a score, which is not a number", index)
    if not math.isfinite(number):
        raise _Unusable(f"{number} as a score, which is not a finite number", index)
    return number


def _as_float(value: Any) -> float | None:
    """Bools and any library's scalars are numbers and have `__float__`; text has not, though float() would read it."""
    try:
        return float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.inf


def _error(function: RewardFunction, what: str, sample: Sample) -> RewardError:
    problem, completion = sample
    of_file = f" of {function.file.name}" if function.file else ""
    on = f"on the prompt “{excerpt(problem.prompt)}” and the completion “{excerpt(completion.text)}”"
    return RewardError("reward_functions", f"The reward function {function.name}{of_file} {what}, {on}.")
