"""Order of evaluation in mlx's lazy graph. mlx starts whatever has its inputs, so independent chunks would all be in memory
together; an explicit dependency makes them run one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def evaluate_after(x: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    """`x` itself, of any shape, whose users are not evaluated before `earlier` (`mx.depends`)."""
    return mx.depends([x], list(earlier))[0] if earlier else x
