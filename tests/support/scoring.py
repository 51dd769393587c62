"""Builds completions and scores them with `reward_functions` entries."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backend.rewards.calls import ThreadCaller
from backend.rewards.resolve import RewardFunction, resolve
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import Answer, FunctionHost, RewardSource, TrainerState
from backend.types import Completion, Group, Problem

_caller = ThreadCaller()  # one for all steps, as a run has it


def score(
    groups: list[Group],
    functions: list[RewardFunction],
    timeout_s: float = 5.0,
    trainer_state: TrainerState | None = None,
    weights: Sequence[float] = (),
) -> Answer:
    """Score with these functions in this process, each call in a thread. Weights are 1 by default."""
    host = FunctionHost(_caller, resolve=lambda *_: functions)
    scorer = Scorer(RewardSource([[]], None, Path.cwd()), host, timeout_s)
    return scorer.score(groups, 0, weights or [1.0] * len(functions), trainer_state or TrainerState())


def reward_function(name: str, call: Callable[..., Any]) -> RewardFunction:
    return RewardFunction.of(name, call)


def make_group(*texts: str, answer: str = "4", kind: str | None = None, **row: object) -> Group:
    problem = Problem(0, "What is 2 + 2?", [], [], answer, kind, row)
    return Group(problem, [Completion([i, i + 1], [0.0, 0.0], text, "eos") for i, text in enumerate(texts)])


def score_of(entry: str, text: str, answer: str = "4", ids: list[int] | None = None, **about) -> float | None:
    """One completion's score by one entry of `reward_functions`."""
    (scores,) = scores_of(entry, [text], answer, None if ids is None else [ids], **about)
    return scores


def scores_of(entry: str, texts: list[str], answer: str = "4", ids: list[list[int]] | None = None, **about) -> list:
    group = make_group(*texts, answer=answer)
    for completion, tokens in zip(group.completions, ids or [[] for _ in texts], strict=True):
        completion.tokens = tokens
    report_of(group, [entry], **about)
    return [next(iter(completion.scores.values())) for completion in group.completions]


def report_of(group: Group, entries: list[str], timeout_s: float = 20.0, **about) -> Answer:
    return score([group], resolve(entries), timeout_s, **about)
