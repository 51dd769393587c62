"""When MLX's cache of freed buffers is given back."""

from __future__ import annotations

import mlx.core as mx

from backend.engine.device import on_cpu

CACHE_SHARE = 0.8
"""Share of MLX's memory limit that arrays and freed buffers may take together before the buffers are given back."""


def release_cached_buffers() -> None:
    """Between sampling and learning, which allocate buffers of different sizes: give freed buffers back to the system, on a GPU only
    under pressure.

    A GPU's buffers are zeroed and mapped again when the next step allocates them, which takes tenths of a second for some gigabytes,
    and MLX itself frees old ones before it exceeds its limit. On a CPU allocating costs nothing to speak of, and memory that
    is kept is taken from other programs.
    """
    if on_cpu() or mx.get_active_memory() + mx.get_cache_memory() > CACHE_SHARE * mx.get_memory_limit():
        mx.clear_cache()
