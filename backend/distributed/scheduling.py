"""Splits the work of a step among the ranks by measured speed. A round takes a fixed time (a pass per token of the
longest completion) and a time per completion: a rank's pace is a line fitted to its last rounds. A free rank gets three
quarters of its even part, and the rest later, when lengths are known; all of it where another round would cost more
than it evens out; nothing where it would be the last to end (guided self-scheduling, Polychronopoulos and Kuck 1987).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx

from backend.config.config import Config
from backend.distributed.collectives import FlatCollectives, keep_together
from backend.distributed.messages import SampledRound, SamplingOrder
from backend.trainer.run_context import StepContext
from backend.types import Problem

FIRST_SHARE = 0.75  # share of its even part in one round
UNKNOWN_SHARE = 0.5  # the same while some pace is unknown
ROUNDS = 24  # rounds that a pace is fitted to
FADING = 0.9  # weight of a round against the next
IDLE_GAIN = 0.9  # per step, so that a slow rank is tried again
NEW_SPEED = 0.5  # weight of a step's learning speed
UNSEEN_GAIN = 1.1  # so that a rank without rows is tried again


@dataclass(frozen=True, slots=True)
class Pace:
    """A round of n completions takes `fixed_s` + `each_s` · n seconds."""

    fixed_s: float
    each_s: float

    def seconds(self, completions: int) -> float:
        return self.fixed_s + self.each_s * completions


class RankPaces:
    def __init__(self, size: int) -> None:
        self.size = size
        self._rounds = [deque[tuple[int, float]](maxlen=ROUNDS) for _ in range(size)]

    def observe(self, rank: int, completions: int, seconds: float) -> None:
        self._rounds[rank].append((completions, max(seconds, 1e-9)))

    def assume_faster(self, rank: int) -> None:
        """Of a rank that got nothing to do, so that it is tried again."""
        self._rounds[rank] = deque([(n, IDLE_GAIN * s) for n, s in self._rounds[rank]], ROUNDS)

    @property
    def are_known(self) -> bool:
        return all(self._rounds)

    def usual_s(self, rank: int, completions: int) -> float | None:
        """Seconds of such a round; None while no rank has done one."""
        return self[rank].seconds(completions) if any(self._rounds) else None

    def __getitem__(self, rank: int) -> Pace:
        if self._rounds[rank]:
            return _fitted(self._rounds[rank])
        known = [_fitted(rounds) for rounds in self._rounds if rounds] or [Pace(0.0, 1.0)]
        return Pace(sum(p.fixed_s for p in known) / len(known), sum(p.each_s for p in known) / len(known))

    def speeds(self) -> list[float]:
        """Completions a second of each rank, the fixed time left out."""
        return [1 / self[rank].each_s for rank in range(self.size)]


def _fitted(rounds: Sequence[tuple[int, float]]) -> Pace:
    # Weighted least squares; through the origin where the line would fall or begin below 0.
    weighted = [(FADING**age, n, s) for age, (n, s) in enumerate(reversed(rounds))]
    total = sum(w for w, _, _ in weighted)
    mean_n, mean_s = sum(w * n for w, n, _ in weighted) / total, sum(w * s for w, _, s in weighted) / total
    spread = sum(w * (n - mean_n) ** 2 for w, n, _ in weighted)
    slope = sum(w * (n - mean_n) * (s - mean_s) for w, n, s in weighted) / spread if spread > 0 else 0.0
    fixed = mean_s - slope * mean_n
    return Pace(fixed, slope) if slope > 0 and fixed > 0 else Pace(0.0, mean_s / mean_n)


class PromptScheduler:
    """The prompts of one step. `take` is called for every free rank, again for one that got nothing."""

    def __init__(self, prompts: int, completions_each: int, paces: RankPaces) -> None:
        self.prompts = self.left = prompts
        self._each, self._paces = completions_each, paces
        self._free_at = [0.0] * paces.size  # when each rank should be done

    def take(self, rank: int, now: float) -> range:
        start = self.prompts - self.left
        if not self.left:
            return range(start, start)
        self._free_at[rank] = now
        free_at = [max(at, now) for at in self._free_at]
        paces = [self._paces[other] for other in range(self._paces.size)]

        def done_by(end: float, other: int) -> float:
            pace = paces[other]
            return max(0.0, end - free_at[other] - pace.fixed_s) / (pace.each_s * self._each)

        # The rank's even part, by bisection: what the ranks get done until a time grows with it.
        low = min(free_at)
        high = max(at + self._seconds(other, self.left) for other, at in enumerate(free_at))
        for _ in range(50):
            end = (low + high) / 2
            done = sum(done_by(end, other) for other in range(self._paces.size))
            low, high = (end, high) if done < self.left else (low, end)
        even = done_by(high, rank)
        count, share = round(even), FIRST_SHARE if self._paces.are_known else UNKNOWN_SHARE
        later, pace = (1 - share) * even, paces[rank]
        if not count:  # a single one may be better off here all the same, if nobody would end it earlier
            ends = [at + self._seconds(other, 1) for other, at in enumerate(free_at)]
            count = int(ends.index(min(ends)) == rank)
        elif later >= 1 and later * self._each * pace.each_s >= pace.fixed_s:
            # Else another round would last longer by more than it would even out: it pays the fixed time again, and
            # its longest completion.
            count = max(1, int(share * even))
        if count := min(count, self.left):
            self.left -= count
            self._free_at[rank] = now + self._seconds(rank, count)
        return range(start, start + count)

    def is_free(self, rank: int, now: float) -> None:
        self._free_at[rank] = now

    def _seconds(self, rank: int, prompts: int) -> float:
        return self._paces[rank].seconds(self._each * prompts)


def sample_round(
    parts: StepContext,
    rank: int,
    order: SamplingOrder,
    start: int,
    problems: Sequence[Problem],
    poll: Callable[[int], None],
) -> SampledRound:
    """Sample a group of every problem; not scored yet. `poll` as in `Sampler.sample`."""
    began = time.perf_counter()
    groups = parts.rollout.sample(problems, order.group_size, parts.sampling, order.seed, order.position + start, poll)
    return SampledRound(rank, start, groups, sampling_s=time.perf_counter() - began)


def score_round(parts: StepContext, order: SamplingOrder, sampled: SampledRound) -> None:
    if parts.scoring.on_leader:  # which scores all rounds together
        return
    began = time.perf_counter()
    sampled.logged = parts.scoring.score(sampled.groups, order.step, order.epoch)
    sampled.scoring_s = time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class LearningReport:
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
    parts: StepContext, config: Config, ranks: FlatCollectives, learn: Callable[[], dict[str, float]]
) -> tuple[dict[str, float], list[LearningReport]]:
    """Call `learn` on every rank, with the same weights. → its metrics, and every rank's report."""
    forward = parts.learner.forward
    began, tokens, waited, summed = time.perf_counter(), forward.own_tokens, ranks.waited_s, ranks.summed_s
    keep_together(parts.learner, config, ranks)
    metrics = learn()
    own = LearningReport(
        tokens=forward.own_tokens - tokens,
        seconds=time.perf_counter() - began,
        waited_s=ranks.waited_s - waited,
        summed_s=ranks.summed_s - summed,
        peak_gb=mx.get_peak_memory() / 1e9,
    )
    return metrics, [LearningReport(**each) for each in ranks.gather(asdict(own))]  # after the last update


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
