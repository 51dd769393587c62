"""Prompts are handed out so that ranks of unequal speed end together: simulated ranks with a clock of their own."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from backend.distributed.hand_out import Pace, PromptScheduler, RankPaces


def simulated(
    seconds: Callable[[int, int], float], size: int, paces: RankPaces, prompts: int, group: int = 8
) -> tuple[list[list[int]], float]:
    """The rounds of each rank, and the share of the time that the ranks waited; `seconds(rank, completions)` is what a round takes."""
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


def steps(
    seconds: Callable[[int, int], float], size: int, prompts: int, count: int = 6
) -> tuple[list[list[int]], float]:
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


def test_the_first_step_finds_out_who_is_slow() -> None:
    _, waiting = simulated(lambda rank, n: n * (3.0 if rank else 1.0), 2, RankPaces(2), 64)
    assert waiting <= 0.1


def test_everything_is_handed_out_at_once_where_a_round_costs_more_than_it_evens_out() -> None:
    """Decoding where the time is that of reading the weights: one completion takes as long as many."""
    rounds, waiting = steps(lambda rank, n: 10.0 + 0.01 * n, 2, 16)
    assert rounds == [[8], [8]] and waiting < 0.01


def test_a_rank_that_would_be_the_last_to_end_gets_nothing() -> None:
    """One pass over the weights takes the second machine longer than all of the step takes the first."""
    rounds, _ = steps(lambda rank, n: (50.0 if rank else 1.0) + 0.1 * n, 2, 8, count=3)
    assert rounds[1] == []


def test_few_prompts_are_not_cut_into_rounds_of_one() -> None:
    """Each round pays for its longest completion, so two rounds of one prompt take longer than one of two."""
    rounds, _ = steps(lambda rank, n: float(n), 8, 16)
    assert rounds == [[2]] * 8


def test_a_rank_that_was_slow_for_a_while_is_asked_again() -> None:
    paces, slow = RankPaces(2), 100.0
    for _ in range(3):
        simulated(lambda rank, n: n * (slow if rank else 1.0), 2, paces, 16)
    slow, given = 1.0, 0
    for _ in range(60):
        rounds, _ = simulated(lambda rank, n: n * (slow if rank else 1.0), 2, paces, 16)
        given = sum(rounds[1])
        if not given:
            paces.assume_faster(1)
    assert given == 8


def test_fewer_prompts_than_ranks() -> None:
    rounds, _ = steps(lambda rank, n: float(n), 4, 2)
    assert sorted(map(sum, rounds)) == [0, 0, 1, 1]


def test_a_pace_is_the_line_through_the_rounds() -> None:
    paces = RankPaces(2)
    assert not paces.are_known
    for n in (8, 16, 40, 8):
        paces.observe(0, n, 2.0 + 0.5 * n)
    assert (paces[0].fixed_s, paces[0].each_s) == pytest.approx((2.0, 0.5))
    assert paces[1] == paces[0], "of a rank that has done nothing yet the mean of the others is assumed"
    paces.observe(1, 8, 4.0)
    assert paces[1] == Pace(0.0, 0.5) and paces.are_known
    falling = RankPaces(1)
    for n, seconds in ((8, 9.0), (16, 8.0)):  # more in less time: chance, so no line
        falling.observe(0, n, seconds)
    assert falling[0].fixed_s == 0.0 and falling[0].each_s > 0
