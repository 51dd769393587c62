"""mlx's lazy graph: compiled functions with a bounded number of traces, and an order of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import mlx.core as mx

MOST_TRACES = 64


def compiled_by_shape(function: Callable[..., Any], inputs: list[Any] | None = None) -> Callable[..., Any]:
    """`function` of arrays under `mx.compile`, with the traces of the last MOST_TRACES combinations of shapes and
    types. mlx would keep all, and on Metal end at its limit of buffers (ml-explore/mlx#4464). Arrays in lists must
    follow the other arguments in shape."""

    @lru_cache(maxsize=MOST_TRACES)
    def compiled(_shapes: tuple[Any, ...]) -> Callable[..., Any]:
        # mlx ties traces to the function object and drops them with it: a new lambda for each combination.
        return mx.compile(lambda *arguments: function(*arguments), inputs=inputs)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return compiled(tuple((x.shape, x.dtype) for x in arguments if isinstance(x, mx.array)))(*arguments)

    return call


def evaluate_after(x: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    """`x`, whose users are evaluated after `earlier`. mlx starts whatever has its inputs, so independent chunks would
    all be in memory."""
    return mx.depends([x], list(earlier))[0] if earlier else x
