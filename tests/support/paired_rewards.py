"""Simulated rewards before and after training with a known true difference: binary, skewed, mostly zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from backend.trainer.evaluation.comparison import Column, estimates

Rewards = tuple[np.ndarray, np.ndarray]  # before and after, by prompt


@dataclass(frozen=True)
class PairedRewards:
    """`draw(rng, prompts)` gives rewards whose true mean difference is `difference`."""

    draw: Callable[[np.random.Generator, int], Rewards]
    difference: float


def passes(before: float, after: float, shared: float) -> PairedRewards:
    """Each prompt passes or not; on the share `shared` of the prompts both sides find the same ones hard."""

    def draw(rng: np.random.Generator, prompts: int) -> Rewards:
        hardness, other = rng.random(prompts), rng.random(prompts)
        of_tuned = np.where(rng.random(prompts) < shared, hardness, other)
        return (hardness < before) * 1.0, (of_tuned < after) * 1.0

    return PairedRewards(draw, after - before)


def mostly_zero(before: float, after: float, sigma: float) -> PairedRewards:
    """Rewards that are 0 but for a few prompts, and log-normal there."""

    def draw(rng: np.random.Generator, prompts: int) -> Rewards:
        base, tuned = ((rng.random(prompts) < share) * rng.lognormal(0, sigma, prompts) for share in (before, after))
        return base, tuned

    return PairedRewards(draw, float((after - before) * np.exp(sigma**2 / 2)))


def few_changes(share: float, up: float) -> PairedRewards:
    """Half of the prompts pass; this share of them is drawn anew after training, passing with chance `up`."""

    def draw(rng: np.random.Generator, prompts: int) -> Rewards:
        base = (rng.random(prompts) < 0.5) * 1.0
        anew = (rng.random(prompts) < up) * 1.0
        return base, np.where(rng.random(prompts) < share, anew, base)

    return PairedRewards(draw, share * (up - 0.5))


CASES = {
    "pass 0.30 to 0.50": passes(0.3, 0.5, 0.6),
    "mostly zero": mostly_zero(0.1, 0.15, 0.8),
    "one prompt in ten changes": few_changes(0.1, 0.8),
}


def covers(case: PairedRewards, prompts: int, cases: int, resamples: int, seed: int) -> float:
    """The share of simulated evaluations, of those with an interval, whose interval contains the true difference."""
    rng = np.random.default_rng(seed)
    inside: list[bool] = []
    for _ in range(cases):
        base, tuned = case.draw(rng, prompts)
        low, high = float(min(base.min(), tuned.min())), float(max(base.max(), tuned.max()))
        change = Column.difference(Column(tuned, low, high), Column(base, low, high))
        mean = estimates([change], resamples, rng)[0]
        if mean.low is not None and mean.high is not None:
            inside.append(mean.low <= case.difference <= mean.high)
    return float(np.mean(inside))
