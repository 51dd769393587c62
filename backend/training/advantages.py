"""Group-relative advantages, in plain Python: scoring on the command line loads no engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

STD_EPSILON = 1e-4


def advantages(rewards: Any, group_size: int, **options: Any) -> tuple[mx.array, dict[str, float]]:
    """`advantage_values`, the advantages as an array [B] in float32."""
    import mlx.core as mx

    values, metrics = advantage_values(rewards, group_size, **options)
    return mx.array(values, mx.float32), metrics


def advantage_values(
    rewards: Any,
    group_size: int,
    *,
    weights: Sequence[float] | None = None,
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
    baseline: str = "group",
    names: Sequence[str] = (),
) -> tuple[list[float], dict[str, float]]:
    """Return the advantages, one a row, in double precision, and the reward metrics.

    `rewards` [B, K] holds NaN or None where a function gave no score; rows i·G … i·G + G − 1 share a prompt. `weights`:
    one per function. `scale_rewards` divides by the standard deviation (n − 1) of the `group`, the `batch`, or by
    nothing (`none`: Dr. GRPO, arXiv:2503.20783). `baseline="leave_one_out"`: RLOO, arXiv:2402.14740.
    `multi_objective_aggregation="normalize_then_sum"` normalises each function per group, then the sum over the batch
    (GDPO, arXiv:2601.05242). Unscored completions get advantage 0. Raises ValueError.
    """
    # NaN means "no score" from now on: it passes through every difference and quotient, and becomes 0 in the last line.
    lists = rewards.tolist() if hasattr(rewards, "tolist") else list(rewards)
    rows = [[math.nan if x is None else float(x) for x in row] for row in lists]
    if group_size < 1 or not rows or len(rows) % group_size:
        raise ValueError(f"rewards has {len(rows)} rows, which are not groups of {group_size}.")
    weights = [1.0] * len(rows[0]) if weights is None else list(weights)
    if any(len(row) != len(weights) for row in rows) or (names and len(names) != len(weights)):
        raise ValueError(f"rewards has {len(rows[0])} scores a row, {len(weights)} weights, {len(names)} names.")
    totals = [_weighted_sum(row, row, weights) for row in rows]
    groups = _in_groups(totals, group_size)
    if multi_objective_aggregation == "sum_then_normalize":
        values, stds = _sum_then_normalize(totals, group_size, scale_rewards)
        if baseline == "leave_one_out":
            # R_i − mean of the others = (R_i − group mean) · n/(n − 1); 0 where n is 1. After the division by the
            # standard deviation, because the factor commutes with it. One scored completion alone is its group's mean,
            # so its x is 0 already; an unscored one stays NaN.
            counts = [sum(not math.isnan(x) for x in group) for group in groups for _ in group]
            values = [x * n / (n - 1) if n > 1 else x for x, n in zip(values, counts, strict=True)]
        elif baseline != "group":
            raise ValueError(f"baseline is group or leave_one_out, not {baseline!r}.")
    elif multi_objective_aggregation == "normalize_then_sum":
        values, stds = _normalize_then_sum(rows, group_size, weights)
    else:
        known = "sum_then_normalize or normalize_then_sum"
        raise ValueError(f"multi_objective_aggregation is {known}, not {multi_objective_aggregation!r}.")
    metrics = {
        "reward": _mean(totals),
        "reward_std": _std(totals),
        # TRL's metric: the share of rows of scale 0. With "batch" and normalize_then_sum that is the batch's scale.
        "frac_reward_zero_std": sum(std <= 1e-8 for std in stds) / len(stds),
        # The share of groups whose completions all got the same reward. The NaN of an unscored group does not count.
        "frac_groups_without_signal": sum(_group_std(group) <= 1e-8 for group in groups) / len(groups),
    }
    if group_size > 1:
        metrics["reward_std_within_groups"] = _mean([_std(group) for group in groups])
    for name, column in zip(names, zip(*rows, strict=True), strict=False):
        metrics |= {f"rewards/{name}/mean": _mean(column), f"rewards/{name}/std": _std(column)}
    return [0.0 if math.isnan(x) else x for x in values], metrics


def _sum_then_normalize(totals: list[float], group_size: int, scale: str) -> tuple[list[float], list[float]]:
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale_rewards is group, batch or none, not {scale!r}.")
    groups = _in_groups(totals, group_size)
    # The mean is always the group's; "batch" shares only the scale.
    stds = [_std(totals, if_single=0.0) if scale == "batch" else _group_std(group) for group in groups]
    values = [
        (total - mean) / (1.0 if scale == "none" else std + STD_EPSILON)
        for group, mean, std in zip(groups, map(_mean, groups), stds, strict=True)
        for total in group
    ]
    return values, [std for std in stds for _ in range(group_size)]


def _normalize_then_sum(
    rows: list[list[float]], group_size: int, weights: list[float]
) -> tuple[list[float], list[float]]:
    # Normalised before the sum, functions of different scale count by weight alone; equal sums of different scores keep
    # different advantages. The second pass over the batch keeps the size independent of the number of functions.
    columns = [
        chain.from_iterable(map(_z_scores, _in_groups(column, group_size))) for column in zip(*rows, strict=True)
    ]
    sums = [_weighted_sum(z, row, weights) for z, row in zip(zip(*columns, strict=True), rows, strict=True)]
    mean, std = _mean(sums), _std(sums, if_single=0.0)
    return [(x - mean) / (std + STD_EPSILON) for x in sums], [std] * len(rows)


def _z_scores(group: Sequence[float]) -> list[float]:
    mean, std = _mean(group), _group_std(group)
    return [(x - mean) / (std + STD_EPSILON) for x in group]


def _weighted_sum(values: Sequence[float], row: Sequence[float], weights: Sequence[float]) -> float:
    if all(map(math.isnan, row)):
        return math.nan
    # fsum rounds once, so the order of the functions changes nothing; with some scores missing, the others still count.
    return math.fsum(w * x for w, x in zip(weights, values, strict=True) if not math.isnan(x))


def _in_groups(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def _mean(values: Sequence[float]) -> float:
    """Mean of the values that are not NaN; exactly x if all equal x."""
    present = [x for x in values if not math.isnan(x)]
    if not present:
        return math.nan
    # Σ x / n need not be x again: 0.1 three times has the mean 0.10000000000000002, and a signal out of nothing.
    return present[0] if min(present) == max(present) else math.fsum(present) / len(present)


def _std(values: Sequence[float], if_single: float = math.nan) -> float:
    """Standard deviation (n − 1) of the values that are not NaN; `if_single` for a list of one."""
    if len(values) == 1:
        return if_single
    mean = _mean(values)
    squares = [(x - mean) ** 2 for x in values if not math.isnan(x)]
    return math.sqrt(math.fsum(squares) / (len(squares) - 1)) if len(squares) > 1 else math.nan


def _group_std(group: Sequence[float]) -> float:
    return _std(group, if_single=0.0)
