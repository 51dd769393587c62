"""How long machines wait for each other's completions: steps simulated with the trainer's own hand-out of prompts, and with equal shares.

A round of completions of lengths l decodes in PASS_S · max(l) + ROW_S · sum(l) seconds: each token of the longest is a pass over the weights,
each token of any a little more. Lengths are log-normal, cut at the limit, which is how completions of a reasoning model look.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from backend.run.distributed.hand_out import HandOut, RankPaces

PASS_S, ROW_S = 3.3e-3, 0.25e-3
"""Of Qwen3-0.6B in 4 bits on an M4 Max, estimated: 940 tokens/s with 4 rows, 2,860 with 32."""
MEDIAN, LIMIT, GROUP = 300, 1024, 8
STEPS, WARM_UP = 30, 6
Lengths = Callable[[], int]


def lengths_of(sigma: float, seed: int) -> Lengths:
    """Draws completion lengths; `sigma` is the deviation of their logarithm."""
    draw = random.Random(seed)
    return lambda: max(1, min(LIMIT, round(MEDIAN * draw.lognormvariate(0.0, sigma))))


def round_s(lengths: Sequence[int], speed: float) -> float:
    """Seconds that a machine takes for these completions; `speed` is 1 for the one above."""
    return (PASS_S * max(lengths) + ROW_S * sum(lengths)) / speed


def handed_out(speeds: Sequence[float], prompts: int, sigma: float, seed: int = 0) -> float:
    """The share of the sampling time that machines wait, the mean over steps, where prompts are handed out as the trainer does it."""
    lengths, paces = lengths_of(sigma, seed), RankPaces(len(speeds))
    shares = [_step(speeds, prompts, lengths, paces) for _ in range(STEPS)]
    return statistics.mean(shares[WARM_UP:])


def _step(speeds: Sequence[float], prompts: int, lengths: Lengths, paces: RankPaces) -> float:
    hand_out, now, idle = HandOut(prompts, GROUP, paces, len(speeds)), 0.0, set(range(len(speeds)))
    running: list[tuple[float, int, int, float]] = []
    busy = 0.0
    while hand_out.left or running:
        for rank in sorted(idle):
            if places := hand_out.take(rank, now):
                idle.remove(rank)
                took = round_s([lengths() for _ in range(GROUP * len(places))], speeds[rank])
                busy += took
                heapq.heappush(running, (now + took, rank, GROUP * len(places), took))
        now, rank, count, took = heapq.heappop(running)
        paces.observe(rank, count, took)
        hand_out.is_free(rank, now)
        idle.add(rank)
    return 1 - busy / (len(speeds) * now)


def equal_shares(speeds: Sequence[float], prompts: int, sigma: float, seed: int = 0) -> float:
    """The same where every machine gets as many prompts as the others."""
    lengths = lengths_of(sigma, seed)
    shares: list[float] = []
    for _ in range(STEPS):
        took = [round_s([lengths() for _ in range(GROUP * prompts // len(speeds))], speed) for speed in speeds]
        shares.append(1 - sum(took) / (len(took) * max(took)))
    return statistics.mean(shares[WARM_UP:])


CASES: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("2 alike", (1, 1)), ("2, one three times slower", (1, 1 / 3)), ("4 alike", (1, 1, 1, 1)), ("4, two half as fast", (1, 1, 0.5, 0.5)), ("8 alike", (1,) * 8),
)  # fmt: skip
PROMPTS, SIGMAS = (16, 32, 64), (0.5, 1.0)


def simulated() -> list[dict[str, Any]]:
    """A row for each case: its machines, prompts a step, deviation of the lengths' logarithm, and the two shares. Seconds of one core."""
    return [
        {
            "machines": name, "prompts": prompts, "sigma": sigma,
            "handed_out": round(handed_out(speeds, prompts, sigma), 3), "equal": round(equal_shares(speeds, prompts, sigma), 3),
        }
        for name, speeds in CASES
        for prompts in PROMPTS
        for sigma in SIGMAS
    ]  # fmt: skip
