"""How a step is shared among ranks of unequal speed, what each waits, and when a rank counts as hung."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from backend.distributed.leader import LEAST_S, TIMES, Leader, SharedSampling
from backend.distributed.messages import SampledRound, SamplingOrder
from backend.distributed.ranks import LostRankError, RankInfo
from backend.distributed.scheduling import LearningReport, PromptScheduler, RankPaces, StepShares
from backend.types import Completion, Group, Problem

Rounds = tuple[list[list[int]], float]
"""The rounds of each rank, and the share of the time that the ranks waited."""


def simulated(seconds: Callable[[int, int], float], size: int, paces: RankPaces, prompts: int) -> Rounds:
    """`seconds(rank, completions)` is what a round of groups of 8 takes."""
    group = 8
    hand_out, now, idle = PromptScheduler(prompts, group, paces, size), 0.0, set(range(size))
    rounds: list[list[int]] = [[] for _ in range(size)]
    busy, ends = 0.0, list[tuple[float, int, int]]()
    handed = []
    while hand_out.left or ends:
        for rank in sorted(idle):
            if places := hand_out.take(rank, now):
                idle.remove(rank)
                handed += places
                rounds[rank].append(len(places))
                took = seconds(rank, len(places) * group)
                busy += took
                heapq.heappush(ends, (now + took, rank, len(places)))
        assert ends, "prompts are left, and nobody takes them"
        now, rank, count = heapq.heappop(ends)
        paces.observe(rank, count * group, seconds(rank, count * group))
        hand_out.is_free(rank, now)
        idle.add(rank)
    assert handed == list(range(prompts))
    return rounds, 1 - busy / (size * now)


def steps(seconds: Callable[[int, int], float], size: int, prompts: int, count: int = 6) -> Rounds:
    """The last of several steps, after which the paces are known."""
    paces = RankPaces(size)
    return [simulated(seconds, size, paces, prompts) for _ in range(count)][-1]


@pytest.mark.parametrize("prompts", [16, 32, 64])
def test_a_rank_three_times_slower_waits_for_nobody_and_nobody_for_it(prompts: int) -> None:
    """An equal split would let the faster one wait for two thirds of its time."""
    noise = random.Random(prompts)
    rounds, waiting = steps(lambda rank, n: n * (3.0 if rank else 1.0) * noise.uniform(0.9, 1.1), 2, prompts)
    assert waiting <= 0.1
    assert 2.0 < sum(rounds[0]) / sum(rounds[1]) < 4.5


def test_everything_is_handed_out_at_once_where_a_round_costs_more_than_it_evens_out() -> None:
    """Decoding where the time is that of reading the weights: one completion takes as long as many."""
    rounds, waiting = steps(lambda rank, n: 10.0 + 0.01 * n, 2, 16)
    assert rounds == [[8], [8]] and waiting < 0.01


def test_a_rank_that_would_be_the_last_to_end_gets_nothing() -> None:
    """One pass over the weights takes the second machine longer than all of the step takes the first."""
    rounds, _ = steps(lambda rank, n: (50.0 if rank else 1.0) + 0.1 * n, 2, 8, count=3)
    assert rounds[1] == []


def sampled(rank: int, tokens: int, sampling_s: float, scoring_s: float) -> SampledRound:
    group = Group(Problem(0, "", [], [1], ""), [Completion([1] * tokens, [0.0] * tokens, "", "eos")])
    return SampledRound(rank, 0, [group], sampling_s, scoring_s)


def a_step(shares: StepShares, learned: tuple[int, int] = (300, 100)) -> dict[str, float]:
    """10 s of sampling, in which rank 0 is busy for 9 and rank 1 for 6; 5 s of learning, with 1 s and 2 s of waiting
    and 1 s of summing."""
    shares.add_sampling([sampled(0, 40, 4.0, 1.0), sampled(1, 30, 5.0, 1.0), sampled(0, 40, 4.0, 0.0)], 10.0, 3.0)
    reports = LearningReport(learned[0], 5.0, 1.0, 1.0, 1.0), LearningReport(learned[1], 5.0, 2.0, 1.0, 2.0)
    return shares.metrics(reports)


def test_rows_are_split_by_the_speeds_of_learning_once_they_are_known() -> None:
    shares = StepShares()
    assert shares.speeds([1.0, 2.0]) == [1.0, 2.0], "before the first update those of sampling"
    a_step(shares)
    assert shares.speeds([1.0, 2.0]) == [100.0, 50.0]
    a_step(shares, (600, 100))
    assert shares.speeds([1.0, 2.0]) == [150.0, 50.0]
    a_step(shares, (600, 0))
    assert shares.speeds([1.0, 2.0]) == pytest.approx([175.0, 55.0]), "a rank without rows may have become faster"
    shares = StepShares()
    a_step(shares, (600, 0))
    assert shares.speeds([1.0, 2.0]) == [1.0, 2.0]


class SilentWorkers:
    """Workers that answer nothing."""

    def __init__(self, size: int) -> None:
        self.machines = [RankInfo(rank, f"mac-{rank}") for rank in range(size)]

    def send(self, *_: Any, **body: Any) -> None: ...

    send_to_all = send

    def receive(self, timeout: float | None = None) -> None:
        return None

    def check(self) -> None: ...

    def slowest(self) -> int:
        return len(self.machines) - 1

    def give_up(self, rank: int, why: str) -> NoReturn:
        raise LostRankError(self.machines[rank], why)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sampling(paces: RankPaces, clock: Clock, scoring_s: float = 0.0) -> SharedSampling:
    problems = [Problem(number, "", [], [1], "") for number in range(8)]
    order = SamplingOrder(1, 0, 0, 0, 4, [])
    return SharedSampling(SimpleNamespace(), SilentWorkers(2), paces, problems, order, [], scoring_s, clock)


@pytest.mark.parametrize("seen", [0, 1])
def test_a_round_that_never_ends_is_that_of_a_rank_that_hangs(seen: int) -> None:
    paces, clock = RankPaces(2), Clock()
    paces.observe(seen, 16, 8.0)
    work = sampling(paces, clock, scoring_s=60.0)
    work._give()
    (count, _), usual_s = work._given[1], work._given[1][0] / 2
    for clock.now in (0.0, LEAST_S, LEAST_S + TIMES * usual_s + 59):
        work._serve(0.0)
    clock.now = LEAST_S + TIMES * usual_s + 61
    with pytest.raises(
        LostRankError,
        match=rf"mac-1 \(rank 1\) answers, but has worked on {count} completions for \d+ s; {usual_s:.1f} s are usual",
    ) as lost:
        work._serve(0.0)
    assert lost.value.rank == 1 and len(lost.value.faults[0].sentence) <= 200


def test_a_rank_that_does_not_come_to_an_update_is_given_up() -> None:
    ranks = SimpleNamespace(rank=0, size=3, waiting=None)
    leader = Leader(SilentWorkers(3), ranks, "ring")  # pyright: ignore[reportArgumentType]
    with leader.detect_hangs("learn"):
        ranks.waiting(3000)  # the first step: nothing is usual
    leader.observe("learn", 2.0)
    with leader.detect_hangs("learn"):
        ranks.waiting(LEAST_S + TIMES * 2 - 1)
        with pytest.raises(LostRankError, match="others have waited 141 s for it to compute; a step took 2") as lost:
            ranks.waiting(LEAST_S + TIMES * 2 + 1)
        assert lost.value.rank == 2
    ranks.waiting(1e6)  # outside of a step that is learned, nobody is judged
