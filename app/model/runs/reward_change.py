"""The reward at the two ends of a run: what the training has changed."""

from __future__ import annotations

import numpy as np

from app.model.runs.run import Run
from backend.spec.runs.archive import first_and_last_means

MOST_AVERAGED = 20
"""Rewards kept of each end: at least as many as `first_and_last_means` averages."""


def rewards_at_the_ends(run: Run) -> list[float]:
    """The first and the last rewards of a run that are numbers, as many as `first_and_last_means` may need."""
    return _ends(_finite_rewards(run))


def reward_before_and_after(run: Run) -> tuple[float | None, float | None]:
    """Mean reward over the first and over the last few steps; (None, the only one) below two."""
    rewards = _finite_rewards(run)  # of 100,000 steps only the ends become Python numbers
    return first_and_last_means(_ends(rewards), len(rewards))


def _finite_rewards(run: Run) -> np.ndarray:
    rewards = run.series("reward")[1]
    return rewards[np.isfinite(rewards)]


def _ends(values: np.ndarray) -> list[float]:
    has_middle = len(values) > 2 * MOST_AVERAGED
    return (np.concatenate([values[:MOST_AVERAGED], values[-MOST_AVERAGED:]]) if has_middle else values).tolist()
