"""Monkeypatches of mlx-lm, each named, listed and reversible.

mlx-lm has no hook for these places, so attributes of its modules and classes are replaced, for the whole process:

| attribute                                             | replaced by                            | while            | because                          |
|-------------------------------------------------------|----------------------------------------|------------------|----------------------------------|
| `mlx_lm.models.<family>.scaled_dot_product_attention` | `scaled_dot_product_attention` below   | since `install`  | bounded memory; vectors on x86   |
| `mlx_lm.models.<family>.swiglu`, `switch_layers` too  | `swiglu` below                         | since `install`  | mlx's exp is scalar on x86       |
| `LoRALinear.__call__`, `DoRALinear.__call__`          | `engine/adapter_product.py`            | since `install`  | in 16 bits as the sampler has it |
| `<class of a model's layers>.__call__`                | a version that recomputes activations  | inside that      | keeping all of them takes        |
|                                                       | (`engine/gradient_checkpointing.py`)   | context          | too much memory                  |

A model's file imports its functions by name (`from .base import scaled_dot_product_attention`), so the name is replaced in
every file that a part of the model comes from, and mlx_lm.models.base and .activations keep theirs. All other calls are passed
on to mlx-lm's own function. No result changes beyond rounding. `active` lists the replacements; `uninstall` undoes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

from backend.engine import adapter_product
from backend.engine.attention import blocked_attention, decode_attention
from backend.engine.cpu import swiglu as vector_swiglu
from backend.engine.cpu.vector_exp import exp_is_scalar
from backend.engine.device import on_cpu
from backend.engine.prefix_cache import AttentionInputs, PrefixReader, PrefixRecorder
from backend.engine.slot_cache import SlotCache

MIN_SWIGLU, MIN_SCORES = 1 << 12, 1 << 14
"""Exponentials of a swiglu, and scores of a decoding step's attention, from which our versions pay on x86; below, the extra
calls cost more than they save."""

MLX_LM_ATTENTION, MLX_LM_SWIGLU = base.scaled_dot_product_attention, activations.swiglu


# ── replacing and restoring attributes ───────────────────────────────────────────────────────────────────────────────


# eq=False: two replacements of one attribute, one inside the other, must not be taken for each other in `_active`.
@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """An attribute of a module or class that holds our function at the moment. `original` is None if the attribute was
    inherited; restoring then deletes it."""

    owner: Any
    attribute: str
    original: Any

    @property
    def name(self) -> str:
        owner = self.owner.__name__
        return (
            f"{self.owner.__module__}.{owner}.{self.attribute}"
            if isinstance(self.owner, type)
            else f"{owner}.{self.attribute}"
        )


_active: list[Replacement] = []


def replace(owner: Any, attribute: str, new: Any) -> Replacement:
    """Set `owner.attribute`, a module's or class's, to `new`, and remember the original."""
    # vars, not getattr: an inherited `__call__` written back would cut the class off from its parent's.
    replacement = Replacement(owner, attribute, vars(owner).get(attribute))
    setattr(owner, attribute, new)
    _active.append(replacement)
    return replacement


def restore(replacement: Replacement) -> None:
    """Put the original back. Does nothing if that has been done already."""
    if replacement not in _active:
        return
    _active.remove(replacement)
    if replacement.original is None:
        delattr(replacement.owner, replacement.attribute)
    else:
        setattr(replacement.owner, replacement.attribute, replacement.original)


def install(model: nn.Module) -> None:
    """Patch the files that the parts of `model` come from. Files that are patched already, and mlx-lm's own two files that
    define the functions, stay as they are."""
    for module in {sys.modules.get(type(part).__module__) for part in model.modules()}:
        for attribute, original, ours in FUNCTIONS:
            # `is original`: a family that defines its own function of this name keeps it.
            if getattr(module, attribute, None) is original and module is not sys.modules[original.__module__]:
                replace(module, attribute, ours)
    for owner, call in adapter_product.METHODS:
        if owner.__call__ is not call and any(type(part) is owner for part in model.modules()):
            replace(owner, "__call__", call)


def uninstall() -> None:
    """Restore every replaced attribute. Compiled functions keep the versions that they were traced with."""
    # Latest first, so that an attribute that was replaced twice ends with its first value.
    for replacement in reversed(_active.copy()):
        restore(replacement)


def active() -> list[str]:
    """The full names of the attributes that are replaced now, e.g. "mlx_lm.models.qwen3.swiglu"."""
    return sorted(replacement.name for replacement in _active)


# ── the replacements ─────────────────────────────────────────────────────────────────────────────────────────────────


def scaled_dot_product_attention(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    """Blocked attention in training, vectorised attention in a large decoding step on x86; mlx-lm's own otherwise."""
    # Sinks are an extra logit in each head's softmax (gpt-oss), which neither of ours computes.
    inputs = _training_inputs(keys, values, cache, mask) if sinks is None else None
    if inputs is not None:
        return blocked_attention(queries, inputs.keys, inputs.values, scale, inputs.prompts)
    # `is`: a model that has changed the mask must get attention with its own mask.
    if sinks is None and isinstance(cache, SlotCache) and mask is cache.mask and _pays(queries, keys):
        return decode_attention(queries, keys, values, scale, mask)
    if hasattr(cache, "bits") or keys.dtype == mx.float32 or not on_cpu():
        return MLX_LM_ATTENTION(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    # On a CPU mlx composes attention of plain operations and rounds queries, scores and weights to 16 bits; on a GPU, and in
    # training, they stay in float32.
    wide = (x.astype(mx.float32) for x in (queries, keys, values))
    return MLX_LM_ATTENTION(*wide, cache=cache, scale=scale, mask=mask, sinks=sinks).astype(values.dtype)


def _training_inputs(keys: mx.array, values: mx.array, cache: Any, mask: Any) -> AttentionInputs | None:
    """The inputs of blocked attention; None if the call is not training's, or the model has changed what our caches returned."""
    if isinstance(cache, (PrefixRecorder, PrefixReader)):
        return cache.attention_inputs(keys, values, mask)
    # Without a cache and with a causal mask over several tokens: whole rows, prompt and completion together. They are padded
    # on the right, where causality hides the padding, so "causal" is the complete mask.
    whole_rows = cache is None and isinstance(mask, str) and keys.shape[2] > 1
    return AttentionInputs(keys, values) if whole_rows else None


def _pays(queries: mx.array, keys: mx.array) -> bool:
    """Whether a decoding step has enough scores for `decode_attention` to be faster than mlx's attention."""
    return exp_is_scalar() and queries.shape[0] * queries.shape[1] * keys.shape[2] >= MIN_SCORES


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up in vectors, where mlx's exp takes one number at a time; mlx-lm's own otherwise."""
    # Equal shapes: our backward pass does not sum over broadcast axes.
    # In 16 bits at any size: ours rounds once and mlx-lm's three times, and small decoding steps must round as large batches do.
    is_large = gate.size >= MIN_SWIGLU or gate.dtype != mx.float32
    pays = gate.shape == up.shape and is_large and exp_is_scalar()
    return vector_swiglu.swiglu(gate, up) if pays else MLX_LM_SWIGLU(gate, up)


FUNCTIONS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("scaled_dot_product_attention", MLX_LM_ATTENTION, scaled_dot_product_attention),
    ("swiglu", MLX_LM_SWIGLU, swiglu),
)
"""(attribute, mlx-lm's, ours)."""
