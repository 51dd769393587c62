"""In which order MLX works: it is lazy, and would begin much more at once than memory need hold."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def evaluate_after(x: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    """`x`, of any shape, not to be worked on before `earlier` stands."""
    return mx.depends([x], list(earlier))[0] if earlier else x
