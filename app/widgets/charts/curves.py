"""Arithmetic of curves, in numpy only: downsampling that keeps peaks, smoothing, axis ranges."""

from __future__ import annotations

import numpy as np

SAMPLE = 2000
"""Values from which a quantile is taken."""


def downsample(x: np.ndarray, most: int, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """Reduce `x` `[n]` and the columns `[n]` to about `most` points; shorter ones are returned unchanged.

    Min-max decimation: each bucket of neighbouring points becomes two, its minimum and its maximum, so no spike is lost.
    A bucket is a gap (NaN) only if every value in it is NaN.
    """
    size = -(-len(x) // max(1, most // 2))
    if size <= 2:
        return (x, *columns)
    starts = np.arange(0, len(x), size)
    # The minimum is drawn at the start of its bucket and the maximum in the middle, whichever came first: a bucket is about
    # a pixel wide, so their order cannot be seen.
    steps = np.empty(2 * len(starts))
    steps[0::2] = x[starts]
    steps[1::2] = x[np.minimum(starts + size // 2, len(x) - 1)]
    reduced = []
    for column in columns:
        extremes = np.empty(2 * len(starts))
        extremes[0::2], extremes[1::2] = _least(column, size), _largest(column, size)
        reduced.append(extremes)
    return (steps, *reduced)


def envelope(x: np.ndarray, most: int, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reduce a band over `x` `[n]` to at most `most` points of each edge: the least of `low` and the largest of `high` in each bucket.

    With both extremes of both edges, as `downsample` keeps them, the band would be a zigzag, and painting it would take ten times as
    long; what it covers is the same.
    """
    size = -(-len(x) // max(1, most))
    if size <= 1:
        return x, low, high
    middles = np.minimum(np.arange(0, len(x), size) + size // 2, len(x) - 1)
    return x[middles].astype(float), _least(low, size), _largest(high, size)


def means(count: int, column: np.ndarray) -> np.ndarray:
    """The mean of the values in each bucket of `downsample`, twice, `[count]`: over the `count` steps that it returned for this column.
    NaN where a bucket has none."""
    table = _buckets(column, -(-len(column) // (count // 2)))
    finite = np.isfinite(table)
    with np.errstate(invalid="ignore"):
        return np.repeat(np.where(finite, table, 0.0).sum(axis=1) / finite.sum(axis=1), 2)


def _least(column: np.ndarray, size: int) -> np.ndarray:
    """The minimum of each bucket of `size` values."""
    return np.fmin.reduce(_buckets(column, size), axis=1)  # fmin and fmax ignore NaN, and do not warn as nanmin does


def _largest(column: np.ndarray, size: int) -> np.ndarray:
    return np.fmax.reduce(_buckets(column, size), axis=1)


def _buckets(column: np.ndarray, size: int) -> np.ndarray:
    """`[buckets, size]`, the last one filled up with NaN."""
    missing = -len(column) % size
    return np.concatenate([column, np.full(missing, np.nan)]).reshape(-1, size)


def isolated_points(values: np.ndarray) -> np.ndarray:
    """Where `values` `[n]` has a number between two gaps, bool `[n]`. A line cannot show such a point, so it gets a dot."""
    finite = np.isfinite(values)
    before = np.concatenate([[False], finite[:-1]])
    after = np.concatenate([finite[1:], [False]])
    return finite & ~before & ~after


def exponential_average(values: np.ndarray, weight: float) -> np.ndarray:
    """Exponential moving average of `values` `[n]` with decay `weight` (0 to below 1).

    The bias of the first steps is corrected (as in Adam: Kingma & Ba, arXiv 1412.6980, section 3). Gaps (NaN) do not
    count and stay gaps.
    """
    if weight <= 0 or len(values) == 0:
        return values
    finite = np.isfinite(values)
    total = _decayed_sum(np.where(finite, values, 0.0), weight)
    count = _decayed_sum(
        finite.astype(float), weight
    )  # the sum of the decayed weights: dividing by it corrects the bias
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(finite, total / count, np.nan)


def _decayed_sum(values: np.ndarray, weight: float) -> np.ndarray:
    """s[t] = weight · s[t−1] + values[t], vectorised by blocks.

    Within a block, s[t] / weight^t is a cumulative sum of values[t] / weight^t. A block is short enough that weight^t
    stays above 1e-12, far from underflow.
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


def axis_range(*columns: np.ndarray, unit: str = "", log: bool = False) -> tuple[float, float]:
    """(low, high) of an axis for the finite numbers in all columns, with a margin; it starts at 0 if they come near 0.

    The margin of a share (`unit`) does not reach beyond 100 %. On a `log` axis the numbers are logarithms, and 0 is nothing special.
    """
    values = np.concatenate([column[np.isfinite(column)] for column in columns]) if columns else np.empty(0)
    if len(values) == 0:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if low == high:
        margin = abs(low) * 0.1 or 0.1
        return (0.0 if low == 0 and not log else low - margin), _top(high, margin, unit)
    margin = (high - low) * 0.07
    starts_at_0 = not log and 0 <= low <= (high - low) * 0.5
    return (0.0 if starts_at_0 else low - margin), high + margin if log else _top(high, margin, unit)


def _top(high: float, margin: float, unit: str) -> float:
    """The upper end of a linear axis. Above 100 % there is room for the width of the line, and no tick."""
    return min(high + margin, 1.02) if unit == "share" and high <= 1 else high + margin


def has_spike(*columns: np.ndarray) -> bool:
    """Whether a few values press all others into a small part of a linear axis that a logarithmic one would spread out: every value
    is 0 or above, and 19 of 20 lie in the lowest eighth."""
    values = np.concatenate([column[np.isfinite(column)] for column in columns]) if columns else np.empty(0)
    if len(values) < 20 or values.min() < 0:
        return False
    some = values[:: -(-len(values) // SAMPLE)]  # of 100,000 steps, several times a second
    return bool(np.quantile(some, 0.95, method="lower") * 8 < values.max())
