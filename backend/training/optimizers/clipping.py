"""Gradient clipping by the global norm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map


def clip_by_norm(grads: Any, max_norm: float | None) -> tuple[Any, mx.array]:
    """The gradients scaled down to a global norm of at most `max_norm`, and their norm before that, a scalar.

    `max_norm` 0 or None never clips. Squares are summed in float32, because 300² overflows float16; each gradient keeps
    its dtype. A norm that is not finite makes the gradients so too: check it before updating.
    """
    squares = [mx.square(g.astype(mx.float32)).sum() for _, g in tree_flatten(grads)]
    norm = mx.sqrt(sum(squares, mx.array(0.0)))
    if not max_norm:
        return grads, norm
    scale = mx.minimum(max_norm / (norm + 1e-6), 1.0)
    return tree_map(lambda g: (g * scale).astype(g.dtype), grads), norm
