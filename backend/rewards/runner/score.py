"""Score the completions of one training step: each reward function is called once, over all completions of all groups.

It fills in `scores` and `reward`, or it stops the run: a function that raises, hangs, or returns anything but a finite
number or None for each completion is an error to mend, never a score of 0. Advantages are computed in
`backend.training.advantages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.rewards.resolve import RewardFunction
from backend.rewards.runner.inputs import Sample, TrainerState
from backend.rewards.runner.reward_errors import reward_error
from backend.rewards.runner.step_calls import FunctionFailed, Poll, Scores, ScoringStep, wait_on
from backend.rewards.runner.timeout import ThreadCaller
from backend.types import Group


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Results of scoring a step beside the scores.

    `seconds` of each function, by name. Logged by functions: `columns`, each with one value for each completion in the
    order of the groups, and `metrics`, one number each.
    """

    seconds: dict[str, float]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def score(
    groups: list[Group],
    functions: list[RewardFunction],
    weights: Sequence[float],
    timeout_s: float,
    trainer_state: TrainerState | None = None,
    poll: Poll = wait_on,
) -> ScoreReport:
    """Score in this process, each call in a thread. Fill every completion's `scores` (by function name, None where it had no opinion)
    and `reward`.

    `reward` is Σ w·score over the functions that are not None, and None if all are. `weights` has one number for each
    function, `timeout_s` is the limit of one call in seconds. Functions are called one after the other, then the `async
    def` ones concurrently. Raises RewardError, and what `poll` raises; no completion is changed then.
    """
    samples = samples_of(groups)
    if not samples:
        return ScoreReport({})
    step = ScoringStep(functions, samples, timeout_s, trainer_state or TrainerState(), ThreadCaller(poll))
    try:
        outcomes = step.outcomes()
    except FunctionFailed as failed:
        function = functions[failed.function].description
        sample = samples[failed.completion]
        raise reward_error(function, failed.what, sample, failed.has_line, failed.traceback) from failed.__cause__
    names = [function.name for function in functions]
    fill_scores(samples, names, [scores for scores, _ in outcomes], weights)
    seconds = {name: seconds for name, (_, seconds) in zip(names, outcomes, strict=True)}
    return ScoreReport(seconds, step.logs.columns, step.logs.metrics)


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """Every completion with its problem, in the order of the groups."""
    return [(group.problem, completion) for group in groups for completion in group.completions]


def fill_scores(
    samples: Sequence[Sample], names: Sequence[str], scores: Sequence[Scores], weights: Sequence[float]
) -> None:
    """Fill in every completion's `scores` and `reward`. `scores`: one list for each of `names`."""
    for (_, completion), row in zip(samples, zip(*scores, strict=True), strict=True):
        completion.scores = dict(zip(names, row, strict=True))
        completion.reward = total_reward(row, weights)


def total_reward(scores: Iterable[float | None], weights: Iterable[float]) -> float | None:
    """Σ w·score over the scores that are not None; None if all are."""
    weighted = [w * x for w, x in zip(weights, scores, strict=True) if x is not None]
    return sum(weighted) if weighted else None
