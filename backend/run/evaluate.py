"""How good the policy is on prompts it does not learn from: mean rewards at the training temperature, greedy accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from backend.data.rows import batches
from backend.generation.rollout import Rollout
from backend.generation.sampler import GREEDY, Sampling
from backend.training.advantages import advantages
from backend.training.batch import completion_metrics
from backend.types import Group, Problem

EVAL_SEED = 0x6576616C
"""Held-out completions are drawn from numbers of their own, the same at each evaluation: differences are the policy's."""

Score = Callable[[list[Group]], object]


def held_out_rewards(
    rollout: Rollout,
    problems: Sequence[Problem],
    score: Score,
    names: Sequence[str],
    weights: Sequence[float],
    *,
    sampling: Sampling,
    group_size: int,
    batch_size: int,
    count: int,
    poll: Callable[[float], None] = lambda done: None,
    beside: bool = True,
) -> dict[str, float]:
    """Mean reward, per-function means and completion lengths over the first `count` batches (−1: all) of `problems`.

    `score` fills the completions' scores. `beside`: in a thread of its own, a batch while the next one is sampled. `poll` is
    called with the share done and may raise to stop.
    """
    groups: list[Group] = []
    chosen = list(batches(problems, batch_size, count))
    with _Scorer(score) as scorer:
        for i, batch in enumerate(chosen):
            made = rollout.sample(
                batch, group_size, sampling, EVAL_SEED, i * batch_size, lambda drawn, i=i: poll(i / len(chosen))
            )
            scorer.begin(made) if beside else score(made)
            groups += made
        scorer.wait()
    return reward_metrics(groups, names, weights) | _lengths(groups)


class _Scorer:
    """Scores one batch after the other in a thread of its own. Leaving waits for the call that runs."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._pool = ThreadPoolExecutor(1, "held-out rewards")
        self._running: Future[object] | None = None

    def __enter__(self) -> _Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def begin(self, groups: list[Group]) -> None:
        self.wait()
        self._running = self._pool.submit(self._score, groups)

    def wait(self) -> None:
        """Raises what the reward functions raised."""
        if self._running is not None:
            self._running.result()


def reward_metrics(groups: Sequence[Group], names: Sequence[str], weights: Sequence[float]) -> dict[str, float]:
    """`reward`, `reward_std` and `rewards/<name>/mean|std` of scored groups."""
    rewards = [[one.scores[name] for name in names] for group in groups for one in group.completions]
    _, metrics = advantages(rewards, 1, weights=weights, names=names)
    return {key: value for key, value in metrics.items() if key != "frac_reward_zero_std"}


def _lengths(groups: Sequence[Group]) -> dict[str, float]:
    metrics = completion_metrics(groups)
    return {key: metrics[key] for key in ("completions/mean_length", "hit_max_tokens_ratio")}


def greedy_accuracy(
    rollout: Rollout,
    problems: Sequence[Problem],
    right: Callable[[list[Group]], Sequence[bool]],
    *,
    batch_size: int = 64,
    poll: Callable[[float], None] = lambda done: None,
) -> float:
    """Share, 0 … 1, of problems whose likeliest completion is right, over all of `problems`."""
    marks: list[bool] = []
    for batch in batches(problems, batch_size, -1):
        marks += right(rollout.sample(batch, 1, GREEDY, EVAL_SEED, 0))
        poll(len(marks) / len(problems))
    return float(np.mean(marks))
