"""What each rank did of a step and how long it waited for the others: metrics, and the speeds by which the next rows are split."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from backend.distributed import group_wire
from backend.distributed.collectives import FlatCollectives
from backend.trainer.run_context import StepContext
from backend.types import Group, Problem

# One round of sampling on any rank: some of a step's problems, sampled and scored there, with the time that it took.


@dataclass(frozen=True, slots=True)
class SamplingOrder:
    """What all rounds of one step, or of one evaluation, have in common."""

    step: int
    epoch: float
    seed: int
    position: int
    """The first problem's number in the run: with the seed, it fixes the random numbers."""
    group_size: int
    scoring: list[dict[str, Any]]
    """The state of adaptive reward weights."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class SampledRound:
    """`start`: the place of the first problem among those of the order. `logged`: the metrics that reward functions logged."""

    rank: int
    start: int
    groups: list[Group]
    sampling_s: float = 0.0
    scoring_s: float = 0.0
    logged: dict[str, float] | None = None

    @property
    def completions(self) -> int:
        return sum(len(group.completions) for group in self.groups)

    @property
    def tokens(self) -> int:
        return sum(completion.trained_tokens for group in self.groups for completion in group.completions)

    @property
    def seconds(self) -> float:
        return self.sampling_s + self.scoring_s

    def packed(self) -> tuple[dict[str, Any], group_wire.Arrays]:
        """As `unpacked_round` takes it, without the problems."""
        body, arrays = group_wire.packed_scored(self.groups)
        about = {"start": self.start, "sampling_s": self.sampling_s, "scoring_s": self.scoring_s, "logged": self.logged}
        return body | {"round": about}, arrays


def unpacked_round(
    rank: int, body: dict[str, Any], arrays: group_wire.Arrays, problems: Sequence[Problem]
) -> SampledRound:
    """`problems`: all of the order."""
    about = body["round"]
    own = problems[about["start"] : about["start"] + len(body["sizes"])]
    return SampledRound(rank, groups=group_wire.unpacked_scored(body, arrays, own), **about)


def sample_round(
    parts: StepContext,
    order: SamplingOrder,
    rank: int,
    start: int,
    problems: Sequence[Problem],
    poll: Callable[[int], None],
) -> SampledRound:
    """Sample a group of every problem; not scored yet. `poll` as in `Rollout.sample`."""
    began = time.perf_counter()
    groups = parts.rollout.sample(problems, order.group_size, parts.sampling, order.seed, order.position + start, poll)
    return SampledRound(rank, start, groups, sampling_s=time.perf_counter() - began)


def score_round(parts: StepContext, order: SamplingOrder, sampled: SampledRound) -> None:
    """Call the reward functions on its completions."""
    began = time.perf_counter()
    sampled.logged = parts.scoring.score(sampled.groups, order.step, order.epoch)
    sampled.scoring_s = time.perf_counter() - began


# ── step shares ──────────────────────────────────────────────────────────────────────────────────────────────────────

NEW_SPEED = 0.5
"""Weight of a step's speed of learning, against the mean of those before."""


RECOVERY = 1.1
"""What the speed of a rank that had no rows is multiplied by: it could not show that it has become faster."""


@dataclass(frozen=True, slots=True)
class LearningReport:
    """A rank's part of a step's updates. `tokens` of its own rows; `seconds` in all, of which it waited for others, and summed."""

    tokens: int
    seconds: float
    waited_s: float
    summed_s: float
    peak_gb: float

    @property
    def busy_s(self) -> float:
        """Seconds in which it computed."""
        return max(self.seconds - self.waited_s - self.summed_s, 1e-9)


def timed_learning(
    parts: StepContext, ranks: FlatCollectives, learn: Callable[[], dict[str, float]]
) -> tuple[dict[str, float], LearningReport]:
    """The metrics that `learn` returns, and its report."""
    forward = parts.learner.forward
    began, tokens, waited, summed = time.perf_counter(), forward.own_tokens, ranks.waited_s, ranks.summed_s
    metrics = learn()
    return metrics, LearningReport(
        tokens=forward.own_tokens - tokens,
        seconds=time.perf_counter() - began,
        waited_s=ranks.waited_s - waited,
        summed_s=ranks.summed_s - summed,
        peak_gb=mx.get_peak_memory() / 1e9,
    )


class StepShares:
    """Collects the reports of a step; `metrics` ends it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._speeds: list[float] | None = None
        self._begin()

    def _begin(self) -> None:
        self._rounds: list[SampledRound] = []
        self._sampling_s, self._peak_gb = 0.0, 0.0
        self._learning: dict[int, LearningReport] = {}

    def add_sampling(self, rounds: Sequence[SampledRound], took_s: float, peak_gb: float) -> None:
        """With dynamic sampling a step has several. `peak_gb`: the leader's."""
        self._rounds += rounds
        self._sampling_s += took_s
        self._peak_gb = max(self._peak_gb, peak_gb)

    def add_learning(self, rank: int, report: LearningReport) -> None:
        self._learning[rank] = report

    def speeds(self, of_sampling: Sequence[float]) -> list[float]:
        """By which the rows of the next update are split: tokens a second of learning; before the first, `of_sampling`."""
        return self._speeds or list(of_sampling)

    def metrics(self) -> dict[str, float]:
        """The metrics of the step, whose reports are all there; a new step begins."""
        step_s = self._sampling_s + self._learning[0].seconds
        waits = [self._waited_s(rank) for rank in range(self._size)]
        metrics = {"waiting_share": sum(waits) / self._size / max(step_s, 1e-9)}
        metrics["time/gradient_sum"] = self._learning[0].summed_s
        for rank, waited in enumerate(waits):
            rounds, learning = [each for each in self._rounds if each.rank == rank], self._learning[rank]
            sampling_s = sum(each.sampling_s for each in rounds)
            metrics |= {
                f"ranks/{rank}/prompts": float(sum(len(each.groups) for each in rounds)),
                f"ranks/{rank}/learn_tokens_per_second": learning.tokens / learning.busy_s,
                f"ranks/{rank}/waiting": waited,
                f"ranks/{rank}/memory": learning.peak_gb if rank else max(learning.peak_gb, self._peak_gb),
            }
            if sampling_s:
                metrics[f"ranks/{rank}/tokens_per_second"] = sum(each.tokens for each in rounds) / sampling_s
        self._observe_speeds()
        self._begin()
        return metrics

    def _waited_s(self, rank: int) -> float:
        busy_s = sum(each.seconds for each in self._rounds if each.rank == rank)
        return max(0.0, self._sampling_s - busy_s) + self._learning[rank].waited_s

    def _observe_speeds(self) -> None:
        reports = [self._learning[rank] for rank in range(self._size)]
        if self._speeds is None and not all(report.tokens for report in reports):
            return  # a rank without rows has shown no speed
        speeds = [report.tokens / report.busy_s for report in reports]
        before = self._speeds or speeds
        self._speeds = [
            NEW_SPEED * new + (1 - NEW_SPEED) * old if new else RECOVERY * old
            for new, old in zip(speeds, before, strict=True)
        ]
