"""Monkeypatches of mlx-lm, which has no hooks for these places. Each is named, listed (`active`) and reversible;
results change by rounding at most.

- attention, swiglu, gated delta of `mlx_lm.models.<family>`: bounded memory in training, vectors on x86, and in 16 bits
as the sampler computes them
- Metal kernels without a gradient (`wkv7_kernel`, `_attn_res_kernel`, `_sinkhorn_kernel`): plain operations
- Ministral's scale of queries, at positions of padding
- on a GPU embeddings and expert gathers; LoRA, and in 16 bits DoRA: `engine/layers.py`
- classes of first layers and norms: `engine/residual_stream.py`; of layers: `engine/gradient_checkpointing.py`

A model's file imports its functions by name, so the name is replaced in every file that a part of the model comes from.
mlx-lm chooses between kernel and plain operations by `self.training`; ours are the same in train and eval mode, so old,
reference and updated log-probabilities agree.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base, gated_delta, rwkv7, switch_layers
from mlx_lm.models.cache import _BaseCache
from mlx_lm.tuner.lora import LoRAEmbedding

from backend.engine import cpu, layers
from backend.engine.attention import blocked_attention, cached_attention
from backend.engine.caches import AttentionInputs, PrefixReader, PrefixRecorder, SlotCache
from backend.engine.cpu import exp_is_scalar
from backend.engine.device import on_cpu, on_gpu
from backend.engine.gated_delta import gated_delta_rule

MIN_SWIGLU = 1 << 12  # exponentials from which ours pay on x86

MLX_LM_ATTENTION, MLX_LM_SWIGLU = base.scaled_dot_product_attention, activations.swiglu
MLX_LM_GATED_DELTA = gated_delta.gated_delta_update


# eq=False: two replacements of one attribute, one inside the other, must not be taken for each other in `_active`.
@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """An attribute of a module or class that holds our function. `original` None: it was inherited."""

    owner: Any
    attribute: str
    original: Any


_active: list[Replacement] = []


def replace(owner: Any, attribute: str, new: Any) -> Replacement:
    """Set `owner.attribute` to `new`, and remember the original."""
    # vars, not getattr: an inherited `__call__` written back would cut the class off from its parent's.
    replacement = Replacement(owner, attribute, vars(owner).get(attribute))
    setattr(owner, attribute, new)
    _active.append(replacement)
    return replacement


@contextmanager
def replaced(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, each (owner, attribute) holds its new value."""
    replacements = [replace(*attribute) for attribute in attributes]
    try:
        yield
    finally:
        for replacement in reversed(replacements):
            _restore(replacement)


def _restore(replacement: Replacement) -> None:
    if replacement not in _active:  # `uninstall` has done it
        return
    _active.remove(replacement)
    if replacement.original is None:
        delattr(replacement.owner, replacement.attribute)
    else:
        setattr(replacement.owner, replacement.attribute, replacement.original)


def install(model: nn.Module) -> None:
    """Patch the files that the parts of `model` come from, once."""
    for module in {sys.modules.get(type(part).__module__) for part in model.modules()}:
        for attribute, original, ours in FUNCTIONS:
            # `is original`: a family that defines its own function of this name keeps it.
            if getattr(module, attribute, None) is original and module is not sys.modules[original.__module__]:
                replace(module, attribute, ours)
        for file, attribute, ours in KERNELS:
            # None: without Metal there is no kernel.
            if module is sys.modules.get(file) and getattr(module, attribute) not in (None, ours):
                replace(module, attribute, ours)
    for owner, attribute, ours in GATHERS if on_gpu() else ():
        if getattr(owner, attribute) is not ours:
            replace(owner, attribute, ours)
    for owner, call in layers.METHODS:
        is_replaced = any(x.owner is owner for x in _active)  # perhaps twice: `residual_stream` acts on marks
        if not is_replaced and any(type(part) is owner for part in model.modules()):
            replace(owner, "__call__", call)


def uninstall() -> None:
    """Restore every replaced attribute. Compiled functions keep what they were traced with."""
    # Latest first, so that an attribute that was replaced twice ends with its first value.
    for replacement in reversed(_active.copy()):
        _restore(replacement)


def active() -> list[str]:
    """The full names of the replaced attributes, e.g. "mlx_lm.models.qwen3.swiglu"."""
    places = ((x.owner, f"{x.owner.__name__}.{x.attribute}") for x in _active)
    return sorted(f"{owner.__module__}.{name}" if isinstance(owner, type) else name for owner, name in places)


def scaled_dot_product_attention(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    """Blocked attention in training, vectors with a cache on x86; else mlx-lm's own."""
    if sinks is None:  # an extra logit in each head's softmax (gpt-oss), which neither of ours computes
        inputs = _training_inputs(keys, values, cache, mask)
        if inputs is not None:
            return blocked_attention(queries, inputs.keys, inputs.values, scale, inputs.prompts)
        # No other cache stands in a pass that is differentiated.
        if isinstance(cache, (SlotCache, _BaseCache)) and not hasattr(cache, "bits") and exp_is_scalar():
            return cached_attention(queries, keys, values, scale, mask)
    if hasattr(cache, "bits") or keys.dtype == mx.float32 or not on_cpu():
        return MLX_LM_ATTENTION(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    # On a CPU mlx composes attention of plain operations and rounds queries, scores and weights to 16 bits; on a GPU,
    # and in training, they stay in float32.
    wide = (x.astype(mx.float32) for x in (queries, keys, values))
    return MLX_LM_ATTENTION(*wide, cache=cache, scale=scale, mask=mask, sinks=sinks).astype(values.dtype)


def _training_inputs(keys: mx.array, values: mx.array, cache: Any, mask: Any) -> AttentionInputs | None:
    if isinstance(cache, (PrefixRecorder, PrefixReader)):
        return cache.attention_inputs(keys, values, mask)  # None: the model has changed what the cache returned
    # Whole rows. They are padded on the right, where causality hides it, so "causal" is the complete mask.
    whole_rows = cache is None and isinstance(mask, str) and keys.shape[2] > 1
    return AttentionInputs(keys, values) if whole_rows else None


def swiglu(gate: mx.array, up: mx.array, ours: Callable[..., Any] | None = None) -> mx.array:
    """silu(gate) · up, in vectors where mlx's exp is scalar, rounded once in 16 bits."""
    # Our backward passes do not sum over broadcast axes.
    if gate.shape != up.shape:
        return MLX_LM_SWIGLU(gate, up)
    has_16_bits = gate.dtype != mx.float32
    # In 16 bits at any size, for small decoding steps must round as large batches do.
    is_ours = has_16_bits or (exp_is_scalar() and gate.size >= MIN_SWIGLU)
    return (ours or cpu.swiglu)(gate, up) if is_ours else MLX_LM_SWIGLU(gate, up)  # pyright: ignore[reportReturnType]


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    **options: Any,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule in chunks, except for a decoding step."""
    if state is not None and q.shape[1] == 1:
        return MLX_LM_GATED_DELTA(q, k, v, a, b, A_log, dt_bias, state, mask, **options)
    # Logarithms of mlx-lm's `compute_g` and `compute_lower_bound_g` in their types: the step's decay is exp of them.
    rate, lower_bound = mx.exp(A_log.astype(mx.float32)), options.get("lower_bound")
    if lower_bound is None:
        log_decay = -rate * nn.softplus(a + dt_bias)
    else:
        log_decay = lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
    beta = mx.sigmoid(b) * (2.0 if options.get("allow_neg_eigval") else 1.0)
    return gated_delta_rule(q, k, v, log_decay, beta, state, mask)


def wkv7(
    r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """RWKV-7's recurrence token by token. r to b: [B, T, H, d]; state [B, H, d, d]."""
    outs: list[mx.array] = []
    for t in range(r.shape[1]):
        out, state = rwkv7._wkv7_step_ops(r[:, t], w[:, t], k[:, t], v[:, t], a[:, t], b[:, t], state)
        outs.append(out)
    return mx.stack(outs, axis=1).astype(r.dtype), state


# (attribute, mlx-lm's, ours)
FUNCTIONS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("scaled_dot_product_attention", MLX_LM_ATTENTION, scaled_dot_product_attention),
    ("swiglu", MLX_LM_SWIGLU, swiglu),
    ("gated_delta_update", MLX_LM_GATED_DELTA, gated_delta_update),
)


def llama_4_scale(size: int, offset: Any, beta: float, longest: int) -> mx.array:
    """The scale of queries by their position. mlx-lm's is NaN below 0, where rows of unequal length have padding."""
    position = mx.arange(size) + (offset[:, None] if isinstance(offset, mx.array) and offset.ndim else offset)
    scale = 1 + beta * mx.log(1 + mx.floor(mx.maximum(position, 0) / longest))
    return scale[:, None, :, None] if scale.ndim == 2 else scale[:, None]


# (file, attribute, ours): functions of one family; kernels without a gradient, for None mlx-lm takes plain operations
KERNELS: tuple[tuple[str, str, Callable[..., Any] | None], ...] = (
    ("mlx_lm.models.ministral3", "_get_llama_4_attn_scale", llama_4_scale),
    ("mlx_lm.models.mistral4", "_get_llama_4_attn_scale", llama_4_scale),
    ("mlx_lm.models.rwkv7", "wkv7_kernel", wkv7),
    ("mlx_lm.models.kimi_k3", "_attn_res_kernel", None),
    ("mlx_lm.models.deepseek_v41", "_sinkhorn_kernel", None),
)
# (owner, attribute, ours)
GATHERS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (nn.Embedding, "__call__", layers.embedding_call),
    (LoRAEmbedding, "__call__", layers.lora_embedding_call),
    (switch_layers, "_gather_sort", layers.gather_sort),
    (switch_layers, "_scatter_unsort", layers.scatter_unsort),
)
