"""Score the completions of one training step: each reward function is called once, over all completions of all groups.

It fills in `scores` and `reward`, or it stops the run: a function that raises, hangs, or returns anything but a finite
number or None for each completion is an error to mend, never a score of 0. Advantages are computed in
`backend.training.advantages`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from backend.rewards.mlx_lm_lora_shim import stand_in_library
from backend.rewards.resolve import RewardFunction
from backend.rewards.runner.error_text import describe_error, shorten
from backend.rewards.runner.extra_logs import ExtraLogs
from backend.rewards.runner.inputs import Sample, TrainerState, inputs_for
from backend.rewards.runner.returned_scores import InvalidScores, Scores, read_scores
from backend.rewards.runner.timeout import CallFailed, CallTimeout, call_with_timeout, gather_with_timeout
from backend.spec.faults import Mistake
from backend.spec.rewards.catalog import nearest
from backend.types import Group


class RewardError(Mistake):
    """A reward function failed on real completions; the sentence on `reward_functions` says which, how and on what."""


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Results of scoring a step beside the scores.

    `seconds` of each function, by name; `unscored`, the number of completions on which no function had an opinion. Logged by
    functions: `columns`, each with one value for each completion in the order of the groups, and `metrics`, one
    number each.
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
    function, `timeout_s` is the limit of one call in seconds. Functions are called one after the other, then the `async
    def` ones concurrently. Raises RewardError; no completion is changed then.
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
    weighted = [w * x for w, x in zip(weights, scores, strict=True) if x is not None]
    return sum(weighted) if weighted else None


Outcome = tuple[Scores, float]
"""Scores, and the seconds that they took."""


class _ScoringStep:
    """The functions' calls over one step's completions."""

    def __init__(self, samples: list[Sample], timeout_s: float, state: TrainerState) -> None:
        self.samples = samples
        self.timeout_s = timeout_s
        self.state = state
        self.logs = ExtraLogs()

    def outcomes(self, functions: list[RewardFunction]) -> dict[str, Outcome]:
        """By function name. Raises RewardError."""
        async_functions = [function for function in functions if function.is_async]
        outcomes = {function.name: self._call(function) for function in functions if not function.is_async}
        if async_functions:
            names = (function.name for function in async_functions)
            outcomes |= zip(names, self._gather(async_functions), strict=True)
        for function in functions:
            if wrong_length := self.logs.length_error(function.name, len(self.samples)):
                raise self._error(function, wrong_length)
        return outcomes

    def _call(self, function: RewardFunction) -> Outcome:
        kwargs = self._kwargs(function)
        start = time.perf_counter()
        try:
            with _stand_in_libraries([function]):
                scores = call_with_timeout(self.timeout_s, lambda: function.call(**kwargs), self._read)
        except (CallTimeout, CallFailed) as failure:
            raise self._failure([function], failure) from failure.__cause__
        return scores, time.perf_counter() - start

    def _gather(self, functions: list[RewardFunction]) -> list[Outcome]:
        with_kwargs = [(function.call, self._kwargs(function)) for function in functions]
        # Defaults bind the loop's variables now; a plain closure would call the last function each time.
        calls = [((lambda call=call, kwargs=kwargs: call(**kwargs)), self._read) for call, kwargs in with_kwargs]
        try:
            with _stand_in_libraries(functions):
                return gather_with_timeout(self.timeout_s, calls)
        except (CallTimeout, CallFailed) as failure:
            raise self._failure(functions, failure) from failure.__cause__

    def _read(self, returned: Any) -> Scores:
        return read_scores(returned, len(self.samples))

    def _kwargs(self, function: RewardFunction) -> dict[str, Any]:
        inputs = inputs_for(self.samples, self.state, function.dialect) | self.logs.loggers_for(function.name)
        for name in function.arguments.missing(inputs):
            raise self._error(function, f"asks for {name}, which is {_unknown_input(name, inputs)}")
        return function.call_kwargs(inputs)

    def _failure(self, functions: list[RewardFunction], failure: CallTimeout | CallFailed) -> RewardError:
        function = functions[failure.index]
        cause = failure.__cause__
        if isinstance(failure, CallTimeout) or cause is None:
            return self._error(function, f"was still running after {self.timeout_s:g} s (reward_timeout)")
        if isinstance(cause, InvalidScores):
            return self._error(function, f"returned {cause}", cause.index)
        return self._error(function, f"raised {describe_error(cause, function.file)}", has_line=True)

    def _error(self, function: RewardFunction, what: str, index: int = 0, has_line: bool = False) -> RewardError:
        """The sentence: which function, its line (unless `has_line`), its failure `what`, and the completion at `index`."""
        problem, completion = self.samples[index]
        of_file = f" of {function.file.name}" if function.file else ""
        line = f", line {function.line}," if function.line and not has_line else ""
        on = f"on the prompt “{shorten(problem.prompt)}” and the completion “{shorten(completion.text)}”"
        return RewardError("reward_functions", f"The reward function {function.name}{of_file}{line} {what}, {on}.")


def _stand_in_libraries(functions: Iterable[RewardFunction]) -> ExitStack:
    """The stand-in for mlx_lm_lora that user code may import while it is called, with its file's own functions."""
    stack = ExitStack()
    files = {id(function.user_file): function.user_file for function in functions if function.user_file}
    for user_file in files.values():
        stack.enter_context(stand_in_library(user_file.functions))
    return stack


def _unknown_input(name: str, inputs: Iterable[str]) -> str:
    close = nearest(name, inputs)
    hint = f"; the nearest is {close}" if close else ""
    return f"neither an input of reward functions nor a column of the dataset{hint}"
