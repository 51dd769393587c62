"""Ours in place of functions that mlx-lm's models call: attention that learns in bounded memory, and the gated unit in vectors.

A model's code finds both by name in the file where its class stands. There ours are put once, for good; whatever they are not
meant for, they hand on. No result changes beyond rounding.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

from backend.engine.attention import attend, look_back
from backend.engine.cpu import swiglu as vectorised
from backend.engine.cpu.vector_exp import spelled_out
from backend.engine.prefix_cache import PrefixReader, PrefixRecorder, Seen
from backend.engine.slot_cache import SlotCache

WORTH_A_GATE, WORTH_A_LOOK = 1 << 12, 1 << 14
"""Exponentials of a gated unit, of a decoding step's attention; fewer cost less than the calls that spell them out."""


def install(model: nn.Module) -> None:
    """Let all parts of the model call ours."""
    for module in {sys.modules.get(type(part).__module__) for part in model.modules()}:
        for name, theirs, ours in STAND_INS:
            if getattr(module, name, None) is theirs and module is not sys.modules[theirs.__module__]:
                setattr(module, name, ours)


def scaled_dot_product_attention(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    """mlx-lm's, for whoever neither learns nor decodes many rows where mlx takes one number at a time."""
    seen = _seen(keys, values, cache, mask) if sinks is None else None
    if seen is not None:
        return attend(queries, seen.keys, seen.values, scale, seen.prompts)
    if sinks is None and isinstance(cache, SlotCache) and mask is cache.mask and _many(queries, keys):
        return look_back(queries, keys, values, scale, mask)
    return THEIR_ATTENTION(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def _seen(keys: mx.array, values: mx.array, cache: Any, mask: Any) -> Seen | None:
    """What learning looks at; None where somebody else asks, or where it is not what its memories gave out."""
    if isinstance(cache, (PrefixRecorder, PrefixReader)):
        return cache.seen(keys, values, mask)
    alone = cache is None and isinstance(mask, str) and keys.shape[2] > 1
    return Seen(keys, values) if alone else None


def _many(queries: mx.array, keys: mx.array) -> bool:
    """Whether a decoding step has so many scores that they are worth spelling out."""
    return spelled_out() and queries.shape[0] * queries.shape[1] * keys.shape[2] >= WORTH_A_LOOK


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """mlx-lm's, where mlx has vectors of its own."""
    fitting = gate.shape == up.shape and gate.size >= WORTH_A_GATE and spelled_out()
    return vectorised.swiglu(gate, up) if fitting else THEIR_SWIGLU(gate, up)


THEIR_ATTENTION, THEIR_SWIGLU = base.scaled_dot_product_attention, activations.swiglu
STAND_INS = (
    ("scaled_dot_product_attention", THEIR_ATTENTION, scaled_dot_product_attention),
    ("swiglu", THEIR_SWIGLU, swiglu),
)
