"""Evaluation on prompts that the policy does not train on: mean rewards at the training temperature, greedy accuracy.

Decides neither when to evaluate nor where the metrics go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np

from backend.rewards.calls import Poll, wait_on
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import GREEDY, Sampling
from backend.training.advantages import advantage_values
from backend.training.batch import completion_metrics
from backend.training.variety import variety_metrics
from backend.types import Group, Problem

EVAL_SEED = 0x6576616C
"""Seed of held-out completions, the same at every evaluation ("eval" in ASCII): differences between two evaluations
come from the policy, not from the random numbers."""

FORWARD_SHARE = 1 / 8
"""Of the completions of an evaluation, which the model and the reference read once more for `entropy` and `kl`: less
than a tenth of the evaluation's time."""
LEAST_FORWARD_ROWS, FORWARD_ROWS = 4, 32
"""Limits of that: fewer have no useful standard error, more would cost time."""

Score = Callable[[list[Group], Poll], object]
"""Fills in the scores of groups; what its second argument raises ends the call."""


def held_out_rewards(
    rollout: Sampler,
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
    overlap_scoring: bool = True,
    measure: Callable[[list[Group]], dict[str, float]] = lambda groups: {},
) -> dict[str, float]:
    """The metrics of a step over the first `count` batches (−1: all) of `problems`: rewards, groups, lengths,
    variety, and those that `measure` returns for the scored groups."""
    groups = scored_groups(
        rollout,
        first_of(problems, batch_size, count),
        score,
        sampling=sampling,
        group_size=group_size,
        batch_size=batch_size,
        poll=poll,
        overlap_scoring=overlap_scoring,
    )
    return evaluation_metrics(groups, names, weights) | measure(groups)


def evaluation_metrics(groups: Sequence[Group], names: Sequence[str], weights: Sequence[float]) -> dict[str, float]:
    """Rewards, lengths and variety of scored groups; those metrics of a step that need no model."""
    lengths = {name: value for name, value in completion_metrics(groups).items() if name != "num_tokens"}
    return reward_metrics(groups, names, weights) | lengths | variety_metrics(groups)


def scored_groups(
    rollout: Sampler,
    problems: Sequence[Problem],
    score: Score,
    *,
    sampling: Sampling,
    group_size: int,
    batch_size: int,
    seed: int = EVAL_SEED,
    poll: Callable[[float], None],
    overlap_scoring: bool,
) -> list[Group]:
    """`group_size` completions of every problem, scored, in order; `batch_size` problems are sampled together.

    `score` fills the completions' scores. With `overlap_scoring` a thread scores one batch while the next one is
    sampled; calls and their order are the same. `poll` is called with the fraction done and may raise to stop. The
    random numbers depend on `seed` and the place in `problems` alone, so two models that get the same problems get
    the same numbers.
    """
    groups: list[Group] = []
    chosen = list(batches(problems, batch_size, -1))
    with _BackgroundScorer(score) as scorer:
        tokens = 0
        for i, batch in enumerate(chosen):
            # A batch as long as the ones before: without any, nobody knows how long completions are.
            expected = tokens / len(groups) * len(batch) if groups else 0.0
            report = _batch_poll(poll, i, len(chosen), expected)
            sampled = rollout.sample(batch, group_size, sampling, seed, i * batch_size, report)
            scorer.submit(sampled) if overlap_scoring else score(sampled, wait_on)
            tokens += sum(len(completion.tokens) for group in sampled for completion in group.completions)
            groups += sampled
        scorer.wait()
    return groups


def _batch_poll(poll: Callable[[float], None], i: int, count: int, expected: float) -> Callable[[int], None]:
    """Turns the tokens of batch `i` of `count`, of about `expected`, into the fraction done of all."""
    return lambda tokens: poll((i + (min(tokens / expected, 1.0) if expected else 0.0)) / count)


def sample_of(groups: Sequence[Group]) -> list[Group]:
    """The first completion of each of some groups, spread evenly over all, each as a group of its own: FORWARD_SHARE
    of the completions within the limits."""
    completions = sum(len(group.completions) for group in groups)
    most = min(FORWARD_ROWS, max(LEAST_FORWARD_ROWS, round(FORWARD_SHARE * completions)))
    every = -(-len(groups) // most)
    return [Group(group.problem, group.completions[:1]) for group in groups[::every]]


def first_of(problems: Sequence[Problem], batch_size: int, count: int) -> list[Problem]:
    """The problems of the first `count` batches (−1: all)."""
    return [problem for batch in batches(problems, batch_size, count) for problem in batch]


def batches(problems: Sequence[Problem], size: int, count: int) -> Iterator[list[Problem]]:
    """The first `count` batches of `size` problems in file order (−1: all of them)."""
    stop = len(problems) if count < 0 else min(len(problems), size * count)
    for start in range(0, stop, size):
        yield list(problems[start : min(start + size, stop)])


class _BackgroundScorer:
    """Scores one batch at a time in a thread of its own. Leaving the `with` block by an exception gives up the call
    that is running."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._pool = ThreadPoolExecutor(1, "held-out rewards")
        self._running: Future[object] | None = None
        self._is_given_up = False

    def __enter__(self) -> _BackgroundScorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_given_up = kind is not None
        self._pool.shutdown()

    def _poll(self) -> None:
        if self._is_given_up:
            raise CancelledError

    def submit(self, groups: list[Group]) -> None:
        self.wait()  # an error of the previous batch is raised here
        self._running = self._pool.submit(self._score, groups, self._poll)

    def wait(self) -> None:
        """Wait for the running call. Raises its exception."""
        if self._running is not None:
            self._running.result()


def reward_metrics(groups: Sequence[Group], names: Sequence[str], weights: Sequence[float]) -> dict[str, float]:
    """The metrics of `advantage_values` for scored groups of one size, whose advantages are not used. Those about
    the spread within a group are left out for groups of one, where there is none."""
    completions = [completion for group in groups for completion in group.completions]
    scores = [[completion.scores[name] for name in names] for completion in completions]
    size = len(groups[0].completions)
    _, metrics = advantage_values(scores, size, weights=weights, names=names)
    within_groups = ("frac_reward_zero_std", "frac_groups_without_signal")
    return {key: value for key, value in metrics.items() if size > 1 or key not in within_groups}


def greedy_accuracy(
    rollout: Sampler,
    problems: Sequence[Problem],
    is_correct: Callable[[list[Group]], Sequence[bool]],
    *,
    batch_size: int = 64,
    poll: Callable[[float], None] = lambda done: None,
) -> float:
    """Fraction, 0 … 1, of all `problems` whose greedy completion is correct; `is_correct` judges a batch of groups
    of 1."""
    correct: list[bool] = []
    for batch in batches(problems, batch_size, -1):
        correct += is_correct(rollout.sample(batch, 1, GREEDY, EVAL_SEED, 0))
        poll(len(correct) / len(problems))
    return float(np.mean(correct))
