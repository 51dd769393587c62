"""Splits the work of a step among the ranks by measured speed. A round takes a fixed time (a pass per token of the
longest completion) and a time per completion: a rank's pace is a line fitted to its last rounds. A free rank gets three
quarters of its even part, and the rest later, when lengths are known; all of it where another round would cost more
than it evens out; nothing where it would be the last to end (guided self-scheduling, Polychronopoulos and Kuck 1987).
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from backend.config.config import Config
from backend.distributed.collectives import FlatCollectives, keep_together
from backend.distributed.messages import SampledRound, SamplingOrder
from backend.trainer.run_context import StepContext
from backend.types import Group

FIRST_SHARE = 0.75  # share of its even part in one round
UNKNOWN_SHARE = 0.5  # the same while some pace is unknown
ROUNDS = 24  # rounds that a pace is fitted to
FADING = 0.9  # weight of a round against the next
IDLE_GAIN = 0.9  # per step, so that a slow rank is tried again
NEW_SPEED = 0.5  # weight of a step's learning speed
UNSEEN_GAIN = 1.1  # so that a rank without rows is tried again


class Pace(NamedTuple):
    """A round of n completions takes `fixed_s` + `each_s` · n seconds."""

    fixed_s: float
    each_s: float

    def seconds(self, completions: int) -> float:
        return self.fixed_s + self.each_s * completions


class RankPaces:
    def __init__(self, size: int) -> None:
        self.rounds = [deque[tuple[int, float]](maxlen=ROUNDS) for _ in range(size)]  # (completions, seconds)

    def observe(self, rank: int, completions: int, seconds: float) -> None:
        self.rounds[rank].append((completions, max(seconds, 1e-9)))

    def assume_faster(self, rank: int) -> None:
        """Of a rank that got nothing to do, so that it is tried again."""
        self.rounds[rank] = deque([(n, IDLE_GAIN * s) for n, s in self.rounds[rank]], ROUNDS)

    def usual_s(self, rank: int, completions: int) -> float | None:
        """Seconds of such a round; None while no rank has done one."""
        return self.fitted()[rank].seconds(completions) if any(self.rounds) else None

    def fitted(self) -> list[Pace]:
        """Every rank's pace; until it has done a round, the mean of the others'."""
        paces = [_fitted(rounds) if rounds else None for rounds in self.rounds]
        mean = Pace(*np.mean([pace for pace in paces if pace] or [(0.0, 1.0)], axis=0).tolist())
        return [pace or mean for pace in paces]

    def speeds(self) -> list[float]:
        """Completions a second of each rank, the fixed time left out."""
        return [1 / pace.each_s for pace in self.fitted()]


def _fitted(rounds: Sequence[tuple[int, float]]) -> Pace:
    n, s = np.array(rounds).T
    weights = FADING ** np.arange(len(n))[::-1]
    slope, fixed = np.polyfit(n, s, 1, w=np.sqrt(weights)).tolist() if len({*n}) > 1 else (0.0, 0.0)
    # Through the origin where the line would fall or begin below 0.
    return Pace(fixed, slope) if slope > 0 and fixed > 0 else Pace(0.0, float(weights @ s / (weights @ n)))


class PromptScheduler:
    """The prompts of one step. `take` is called for every rank that is not in `given`, again for one that got nothing.
    The caller deletes a rank from `given` when its round is done."""

    def __init__(self, prompts: int, completions_each: int, paces: RankPaces) -> None:
        self.prompts = self.left = prompts
        self.given: dict[int, tuple[int, float]] = {}  # rank → (completions of its round, when given)
        self._each, self._paces = completions_each, paces

    def take(self, rank: int, now: float) -> range:
        paces = self._paces.fitted()
        # The rank's even part: each prompt goes to the rank that would end it first.
        ends = [(now + pace.seconds(self._each), other) for other, pace in enumerate(paces)]
        for other, (given, since) in self.given.items():
            free_at = max(now, since + paces[other].seconds(given))
            ends[other] = free_at + paces[other].seconds(self._each), other
        heapq.heapify(ends)
        count = 0
        for _ in range(self.left):
            end, first = ends[0]
            count += first == rank
            heapq.heapreplace(ends, (end + paces[first].each_s * self._each, first))
        share = FIRST_SHARE if all(self._paces.rounds) else UNKNOWN_SHARE
        later = (1 - share) * count
        if later >= 1 and later * self._each * paces[rank].each_s >= paces[rank].fixed_s:
            # Else another round costs more time than it evens out: the fixed time again, and its longest completion.
            count = int(share * count)
        start = self.prompts - self.left
        if count:
            self.left -= count
            self.given[rank] = self._each * count, now
        return range(start, start + count)


def sample_round(parts: StepContext, rank: int, order: SamplingOrder, poll: Callable[[int], None]) -> SampledRound:
    """Sample a group of every problem; not scored yet. `poll` as in `Sampler.sample`."""
    began, first = time.perf_counter(), order.position + order.start
    groups = parts.rollout.sample(order.problems, order.group_size, parts.sampling, order.seed, first, poll)
    return SampledRound(rank, order.start, groups, sampling_s=time.perf_counter() - began)


def score_round(parts: StepContext, order: SamplingOrder, sampled: SampledRound) -> None:
    if parts.scoring.on_leader:  # which scores all rounds together
        return
    began = time.perf_counter()
    sampled.logged = parts.scoring.score(sampled.groups, order.step, order.epoch)
    sampled.scoring_s = time.perf_counter() - began


class LearningReport(NamedTuple):
    """A rank's part of a step's updates. `tokens`: of its rows."""

    tokens: int
    seconds: float
    waited_s: float
    summed_s: float
    peak_gb: float

    @property
    def busy_s(self) -> float:
        return max(self.seconds - self.waited_s - self.summed_s, 1e-9)


def learn_together(
    parts: StepContext, groups: list[Group], config: Config, poll: Callable[[], None], ranks: FlatCollectives
) -> tuple[dict[str, float], list[LearningReport]]:
    """`StepContext.learn` on every rank, with the same weights. → its metrics, and every rank's report."""
    forward = parts.learner.forward
    began, tokens, waited, summed = time.perf_counter(), forward.own_tokens, ranks.waited_s, ranks.summed_s
    keep_together(parts.learner, config, ranks)
    metrics = StepContext.learn(parts, groups, config, poll)
    own = LearningReport(
        tokens=forward.own_tokens - tokens,
        seconds=time.perf_counter() - began,
        waited_s=ranks.waited_s - waited,
        summed_s=ranks.summed_s - summed,
        peak_gb=mx.get_peak_memory() / 1e9,
    )
    return metrics, [LearningReport(*each) for each in ranks.gather(own)]  # after the last update


class StepShares:
    """The work of each rank in a step, and the speeds by which rows are split."""

    def __init__(self) -> None:
        self._speeds: list[float] | None = None
        self._rounds: list[SampledRound] = []
        self._sampling_s, self._peak_gb = 0.0, 0.0

    def add_sampling(self, rounds: Sequence[SampledRound], took_s: float, peak_gb: float) -> None:
        """With dynamic sampling a step has several. `peak_gb`: the leader's."""
        self._rounds += rounds
        self._sampling_s += took_s
        self._peak_gb = max(self._peak_gb, peak_gb)

    def speeds(self, of_sampling: Sequence[float]) -> list[float]:
        """Tokens a second of learning; before the first update, `of_sampling`."""
        return self._speeds or list(of_sampling)

    def metrics(self, reports: Sequence[LearningReport]) -> dict[str, float]:
        """The step's metrics, from the learning of every rank. The next step begins."""
        step_s = self._sampling_s + reports[0].seconds
        metrics = {"waiting_share": 0.0, "time/gradient_sum": reports[0].summed_s}
        for rank, learning in enumerate(reports):
            rounds = [each for each in self._rounds if each.rank == rank]
            sampling_s = sum(each.sampling_s for each in rounds)
            waiting_s = max(0.0, self._sampling_s - sum(each.seconds for each in rounds)) + learning.waited_s
            metrics |= {
                f"ranks/{rank}/prompts": float(sum(len(each.groups) for each in rounds)),
                f"ranks/{rank}/learn_tokens_per_second": learning.tokens / learning.busy_s,
                f"ranks/{rank}/waiting": waiting_s,
                f"ranks/{rank}/memory": learning.peak_gb if rank else max(learning.peak_gb, self._peak_gb),
            }
            metrics["waiting_share"] += waiting_s / len(reports) / max(step_s, 1e-9)
            if sampling_s:
                metrics[f"ranks/{rank}/tokens_per_second"] = sum(each.tokens for each in rounds) / sampling_s
        # A rank without rows has shown no speed.
        if self._speeds is not None or all(report.tokens for report in reports):
            speeds = [report.tokens / report.busy_s for report in reports]
            self._speeds = [
                NEW_SPEED * new + (1 - NEW_SPEED) * old if new else UNSEEN_GAIN * old
                for new, old in zip(speeds, self._speeds or speeds, strict=True)
            ]
        self._rounds, self._sampling_s, self._peak_gb = [], 0.0, 0.0
        return metrics
