"""Arithmetic behind a plot: thinning long curves without losing their peaks, and smoothing noisy ones. numpy only."""

from __future__ import annotations

import numpy as np


def downsample(x: np.ndarray, most: int, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """`x` `[n]` and the columns `[n]`, in at most about `most` points; short ones come back as they are.

    Every bucket keeps the least and the greatest value of each column, so that no spike is lost; gaps (NaN) stay where
    a whole bucket is one. The first two points of a bucket carry its least and greatest in turn.
    """
    size = -(-len(x) // max(1, most // 2))
    if size <= 2:
        return (x, *columns)
    buckets = -(-len(x) // size)
    padded = buckets * size - len(x)
    places = x[np.minimum(np.arange(buckets) * size, len(x) - 1)].astype(float)
    step = np.empty(2 * buckets)
    step[0::2] = places
    step[1::2] = x[np.minimum(np.arange(buckets) * size + size // 2, len(x) - 1)]
    return (step, *(_extremes(column, buckets, size, padded) for column in columns))


def _extremes(column: np.ndarray, buckets: int, size: int, padded: int) -> np.ndarray:
    table = np.concatenate([column, np.full(padded, np.nan)]).reshape(buckets, size)
    found = np.empty(2 * buckets)
    found[0::2] = np.fmin.reduce(table, axis=1)
    found[1::2] = np.fmax.reduce(table, axis=1)
    return found


def isolated_points(values: np.ndarray) -> np.ndarray:
    """Where `values` `[n]` has a number between two gaps: a line cannot show it, a dot must. Bool `[n]`."""
    there = np.isfinite(values)
    before = np.concatenate([[False], there[:-1]])
    after = np.concatenate([there[1:], [False]])
    return there & ~before & ~after


def exponential_average(values: np.ndarray, weight: float) -> np.ndarray:
    """The exponential moving average of `values` `[n]`, each step keeping `weight` (0 to below 1) of the past.

    Free of bias at the start (as in Adam: Kingma & Ba, arXiv 1412.6980, section 3), and gaps neither count nor fill.
    """
    if weight <= 0 or len(values) == 0:
        return values
    there = np.isfinite(values)
    total = _decayed_sum(np.where(there, values, 0.0), weight)
    count = _decayed_sum(there.astype(float), weight)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(there, total / count, np.nan)


def _decayed_sum(values: np.ndarray, weight: float) -> np.ndarray:
    """s[t] = weight · s[t−1] + values[t], a block at a time.

    Inside a block the sum is a cumulative one after dividing by weight^t; a block is short enough for that power to
    stay far from underflow.
    """
    block = max(1, int(np.log(1e-12) / np.log(weight)))
    blocks = -(-len(values) // block)
    table = np.zeros(blocks * block)
    table[: len(values)] = values
    powers = weight ** np.arange(block)
    table = np.cumsum(table.reshape(blocks, block) / powers, axis=1) * powers
    carried, carry = np.empty(blocks), 0.0
    for i in range(blocks):
        carried[i] = carry
        carry = table[i, -1] + carry * weight**block
    return (table + carried[:, None] * (powers * weight)).reshape(-1)[: len(values)]


def axis_range(*columns: np.ndarray) -> tuple[float, float]:
    """An axis that fits the numbers in all columns with a little air, and starts at 0 where they come near it."""
    found = np.concatenate([column[np.isfinite(column)] for column in columns]) if columns else np.empty(0)
    if len(found) == 0:
        return 0.0, 1.0
    low, high = float(found.min()), float(found.max())
    if low == high:
        air = abs(low) * 0.1 or 0.1
        return (0.0 if low == 0 else low - air), high + air
    air = (high - low) * 0.07
    return (0.0 if 0 <= low <= (high - low) * 0.5 else low - air), high + air
