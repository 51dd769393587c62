"""The chance that a group has both passes and failures. Pure Python, for callers that start without numpy."""

import math
from collections.abc import Sequence
from functools import lru_cache

PRIOR = 2.0  # α₀ + β₀ of a pass rate's Beta distribution


def signal_chance(alpha: float, beta: float, group_size: int) -> float:
    """Probability that a group has both passes and failures, for a pass rate distributed as Beta(alpha, beta)."""

    def all_pass(a: float, b: float) -> float:  # B(a + G, b) / B(a, b)
        return math.exp(
            math.lgamma(a + group_size) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(a + b + group_size)
        )

    return 1 - all_pass(alpha, beta) - all_pass(beta, alpha)


@lru_cache(1024)
def prior_strength(mean: float, signal: float, group_size: int) -> float:
    """α + β of the Beta distribution with this mean by which a share `signal` of the groups has a signal; 0.1 to 4."""
    low, high = 0.1, 4.0
    for _ in range(20):
        middle = math.sqrt(low * high)
        if signal_chance(middle * mean, middle * (1 - mean), group_size) < signal:
            low = middle
        else:
            high = middle
    return middle


def passes(reward: float, solved_from: float, lowest: float, highest: float) -> float:
    """1 for a reward from `solved_from` on, otherwise its share of the range of rewards."""
    if reward >= solved_from or highest <= lowest:
        return float(reward >= solved_from)
    return (reward - lowest) / (highest - lowest)


def expected_signal(groups: Sequence[Sequence[float]], group_size: int, solved_from: float) -> float:
    """Expected share of groups with a signal over prompts like these, from rewards of a few completions of each."""
    every = [reward for rewards in groups for reward in rewards]
    limits = solved_from, min(every), max(every)
    counts = [(sum(passes(reward, *limits) for reward in rewards), len(rewards)) for rewards in groups]
    mean = min(max(sum(solved for solved, _ in counts) / len(every), 0.05), 0.95)
    chances = [signal_chance(PRIOR * mean + a, PRIOR * (1 - mean) + n - a, group_size) for a, n in counts]
    return sum(chances) / len(chances)
