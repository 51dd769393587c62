"""One round of sampling on any rank: some of a step's problems, sampled and scored there, with the time that it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backend.run.distributed import group_wire
from backend.run.step_parts import StepParts
from backend.types import Group, Problem


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
    parts: StepParts,
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


def score_round(parts: StepParts, order: SamplingOrder, sampled: SampledRound) -> None:
    """Call the reward functions on its completions."""
    began = time.perf_counter()
    sampled.logged = parts.scoring.score(sampled.groups, order.step, order.epoch)
    sampled.scoring_s = time.perf_counter() - began
