"""Score a step's completions: each function once, over all completions of all groups together.

It decides nothing about training. It fills in `scores` and `reward`, or it stops the run: a function that raises,
hangs, or returns anything but a finite number or None for each completion is a mistake to mend, never a 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from backend.rewards.mlx_lm_lora import library
from backend.rewards.resolve import RewardFunction
from backend.rewards.runner.excerpts import describe, excerpt
from backend.rewards.runner.extra_logs import Logs
from backend.rewards.runner.inputs import Sample, TrainerState, inputs_for
from backend.rewards.runner.returned_scores import Scores, Unusable, read_scores
from backend.rewards.runner.timeout import CallFailed, TimeUp, call_within, gather_within
from backend.spec.faults import Mistake
from backend.spec.rewards.catalog import nearest
from backend.types import Group


class RewardError(Mistake):
    """A reward function failed on real completions; one sentence on `reward_functions` says which, how and on what."""


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """What scoring a step gave beside the scores.

    `seconds` each function took, by name; `unscored` completions on which no function had an opinion. What functions
    logged: `columns`, each with one value a completion in the order of the groups, and `metrics`, one number each.
    """

    seconds: dict[str, float]
    unscored: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def score(
    groups: list[Group],
    functions: list[RewardFunction],
    weights: Sequence[float],
    timeout_s: float,
    trainer_state: TrainerState | None = None,
) -> ScoreReport:
    """Fill every completion's `scores` (by function name, None where it had no opinion) and `reward`.

    `reward` is Σ w·score over the functions that are not None, and None if all are. `weights` has one number for each
    function, `timeout_s` is the limit of one call in seconds. Functions are called one after the other, the `async def`
    ones afterwards and all together. Raises RewardError; no completion is changed then.
    """
    samples = [(group.problem, completion) for group in groups for completion in group.completions]
    step = _ScoringStep(samples, timeout_s, trainer_state or TrainerState())
    outcomes = step.outcomes(functions) if samples else {}
    rows = zip(*(outcomes[function.name][0] for function in functions if samples), strict=True)
    for (_, completion), row in zip(samples, rows, strict=True):
        completion.scores = {function.name: x for function, x in zip(functions, row, strict=True)}
        completion.reward = total_reward(row, weights)
    unscored = sum(completion.reward is None for _, completion in samples)
    seconds = {function.name: outcomes[function.name][1] for function in functions if samples}
    return ScoreReport(seconds, unscored, step.logs.columns, step.logs.metrics)


def total_reward(scores: Iterable[float | None], weights: Iterable[float]) -> float | None:
    """Σ w·score over the scores that are not None; None if all are."""
    counted = [w * x for w, x in zip(weights, scores, strict=True) if x is not None]
    return sum(counted) if counted else None


Outcome = tuple[Scores, float]
"""Scores, and the seconds that they took."""


class _ScoringStep:
    """One step's completions, on their way through the functions."""

    def __init__(self, samples: list[Sample], timeout_s: float, state: TrainerState) -> None:
        self.samples = samples
        self.timeout_s = timeout_s
        self.state = state
        self.logs = Logs()

    def outcomes(self, functions: list[RewardFunction]) -> dict[str, Outcome]:
        """By function name. Raises RewardError."""
        waiting = [function for function in functions if function.is_async]
        outcomes = {function.name: self._called(function) for function in functions if not function.is_async}
        if waiting:
            outcomes |= zip((function.name for function in waiting), self._awaited(waiting), strict=True)
        for function in functions:
            if uneven := self.logs.uneven(function.name, len(self.samples)):
                raise self._error(function, uneven)
        return outcomes

    def _called(self, function: RewardFunction) -> Outcome:
        given = self._arguments(function)
        began = time.perf_counter()
        try:
            with _libraries([function]):
                scores = call_within(self.timeout_s, lambda: function.call(**given), self._read)
        except (TimeUp, CallFailed) as failure:
            raise self._failure([function], failure) from failure.__cause__
        return scores, time.perf_counter() - began

    def _awaited(self, functions: list[RewardFunction]) -> list[Outcome]:
        calls = [(function.call, self._arguments(function)) for function in functions]
        # Bound here and now: a closure over the loop's variables would call the last function each time.
        works = [((lambda call=call, given=given: call(**given)), self._read) for call, given in calls]
        try:
            with _libraries(functions):
                return gather_within(self.timeout_s, works)
        except (TimeUp, CallFailed) as failure:
            raise self._failure(functions, failure) from failure.__cause__

    def _read(self, returned: Any) -> Scores:
        return read_scores(returned, len(self.samples))

    def _arguments(self, function: RewardFunction) -> dict[str, Any]:
        offered = inputs_for(self.samples, self.state, function.dialect) | self.logs.offered_to(function.name)
        for name in function.arguments.lacking(offered):
            raise self._error(function, f"asks for {name}, which is {_not_offered(name, offered)}")
        return function.takes(offered)

    def _failure(self, functions: list[RewardFunction], failure: TimeUp | CallFailed) -> RewardError:
        function = functions[failure.index]
        cause = failure.__cause__
        if isinstance(failure, TimeUp) or cause is None:
            return self._error(function, f"was still running after {self.timeout_s:g} s (reward_timeout)")
        if isinstance(cause, Unusable):
            return self._error(function, f"returned {cause}", cause.index)
        return self._error(function, f"raised {describe(cause, function.file)}", has_line=True)

    def _error(self, function: RewardFunction, what: str, index: int = 0, has_line: bool = False) -> RewardError:
        """The sentence: which function and where it stands, what it did, on which completion."""
        problem, completion = self.samples[index]
        of_file = f" of {function.file.name}" if function.file else ""
        line = f", line {function.line}," if function.line and not has_line else ""
        on = f"on the prompt “{excerpt(problem.prompt)}” and the completion “{excerpt(completion.text)}”"
        return RewardError("reward_functions", f"The reward function {function.name}{of_file}{line} {what}, {on}.")


def _libraries(functions: Iterable[RewardFunction]) -> ExitStack:
    """The library that a person's code may import while it is called, with each file's own functions in it."""
    stack = ExitStack()
    for home in {id(function.home): function.home for function in functions if function.home}.values():
        stack.enter_context(library(home.functions))
    return stack


def _not_offered(name: str, offered: Iterable[str]) -> str:
    close = nearest(name, offered)
    hint = f"; the nearest is {close}" if close else ""
    return f"neither an input of reward functions nor a column of the dataset{hint}"
