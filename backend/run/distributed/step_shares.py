"""What each rank did of a step and how long it waited for the others: metrics, and the speeds by which the next rows are split."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from backend.run.distributed.collectives import FlatCollectives
from backend.run.distributed.sampled_round import SampledRound
from backend.run.step_parts import StepParts

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
    parts: StepParts, ranks: FlatCollectives, learn: Callable[[], dict[str, float]]
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
