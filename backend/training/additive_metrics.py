"""Metrics that add over micro-batches: numerators and denominators are kept apart until the whole update is through.

A mean of means would depend on how a batch is split into micro-batches; a sum of numerators over a sum of denominators does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import mlx.core as mx

Tally = dict[str, dict[str, mx.array]]
"""{"mean": {name: [numerator, denominator]}, "sum" | "min" | "max": {name: scalar}}; a kind may be missing."""


def token_mean(x_BT: mx.array, mask_BT: mx.array) -> mx.array:
    """[numerator, denominator] of the mean over the tokens that count, without gradient."""
    return mx.stop_gradient(mx.stack([(x_BT * mask_BT).sum(), mask_BT.sum()]))


def row_mean(x_B1: mx.array) -> mx.array:
    """[numerator, denominator] of the mean over rows, without gradient."""
    return mx.stop_gradient(mx.stack([x_B1.sum().astype(mx.float32), mx.array(float(x_B1.shape[0]))]))


def combine(tallies: Iterable[Tally]) -> Tally:
    """One tally for several micro-batches, or for several steps."""
    operations = {"mean": mx.add, "sum": mx.add, "min": mx.minimum, "max": mx.maximum}

    def both(a: Tally, b: Tally) -> Tally:
        return {kind: {name: operations[kind](x, b[kind][name]) for name, x in a[kind].items()} for kind in a}

    return reduce(both, tallies)


def merge(tallies: Iterable[Tally]) -> dict[str, mx.array]:
    """The metrics of several micro-batches as those of one batch. NaN for a minimum or maximum over nothing."""
    whole = combine(tallies)
    metrics = {name: ratio[0] / mx.maximum(ratio[1], 1) for name, ratio in whole.get("mean", {}).items()}
    extremes = {
        name: mx.where(mx.isinf(x), mx.nan, x) for kind in ("min", "max") for name, x in whole.get(kind, {}).items()
    }
    return metrics | whole.get("sum", {}) | extremes
