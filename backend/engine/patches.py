"""Monkeypatches of mlx-lm, each named, listed and reversible.

mlx-lm has no hook for these places, so attributes of its modules and classes are replaced for the whole process:

- `scaled_dot_product_attention` of `mlx_lm.models.<family>`, by the function below: bounded memory; vectors on x86.
- `swiglu` of `mlx_lm.models.<family>` and `switch_layers`, by the function below: mlx's exp is scalar on x86; in 16
  bits as the sampler computes it.
- `gated_delta_update` of `mlx_lm.models.<family>`, by the function below: the gradient of mlx-lm's loop takes too much
  memory, and its Metal kernel has none.
- `mlx_lm.models.rwkv7.wkv7_kernel`, by `wkv7` below: a Metal kernel has no gradient.
- `mlx_lm.models.kimi_k3._attn_res_kernel` and `mlx_lm.models.deepseek_v41._sinkhorn_kernel`, on Metal, by None, which
  stands for mlx-lm's plain operations: a Metal kernel has no gradient.
- `nn.Embedding.__call__`, `LoRAEmbedding.__call__`, `switch_layers._gather_sort` and `._scatter_unsort`, on a GPU, by
  those of `engine/gathers.py`: the gradient of a gather adds in no fixed order there.
- `LoRALinear.__call__` and `DoRALinear.__call__`, by `engine/sixteen_bits.py`: in 16 bits as the sampler computes them.
- `__call__` of the class of a first layer or a norm, by one that acts on marked modules (`engine/residual_stream.py`):
  the residual stream of a model of 16 bits is kept in float32.
- `__call__` of the class of a model's layers, inside that context, by a version that recomputes activations
  (`engine/gradient_checkpointing.py`): keeping all of them takes too much memory.

All but the last are in place from `install` on.

A model's file imports its functions by name (`from .base import scaled_dot_product_attention`), so the name is replaced
in every file that a part of the model comes from, and mlx-lm's files that define them (base, activations, gated_delta)
keep theirs. All other calls are passed on to mlx-lm's own function. No result changes beyond rounding. `active` lists
the replacements; `uninstall` undoes them.

On Metal, mlx-lm chooses between a kernel and plain operations by `self.training`, so that old and reference
log-probabilities, computed in eval mode, would differ from those of the update. Ours takes the same operations in both.
What is left, of all its models: the step kernels of `ssm` (Mamba 2 and its hybrids) serve single tokens after a cached
state, hence decoding alone; `bitlinear_layers` (BitNet, whose layers take no adapters) has no plain form; `dbrx`
computes its experts in another order in eval mode, which is rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base, gated_delta, rwkv7, switch_layers
from mlx_lm.tuner.lora import LoRAEmbedding

from backend.engine import cpu as vector_swiglu
from backend.engine import gathers, sixteen_bits
from backend.engine.attention import blocked_attention, decode_attention
from backend.engine.caches import SlotCache
from backend.engine.cpu import exp_is_scalar
from backend.engine.device import on_cpu, on_gpu
from backend.engine.gated_delta import gated_delta_rule
from backend.engine.prefix_cache import AttentionInputs, PrefixReader, PrefixRecorder
from backend.engine.sixteen_bits import swiglu_16

MIN_SWIGLU, MIN_SCORES = 1 << 12, 1 << 14
"""Exponentials of a swiglu, and scores of a decoding step's attention, from which our versions pay on x86; below, the
extra calls cost more than they save."""

MLX_LM_ATTENTION, MLX_LM_SWIGLU = base.scaled_dot_product_attention, activations.swiglu
MLX_LM_GATED_DELTA = gated_delta.gated_delta_update


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
    """Patch the files that the parts of `model` come from. Files that are patched already, and mlx-lm's own two files
    that define the functions, stay as they are."""
    for module in {sys.modules.get(type(part).__module__) for part in model.modules()}:
        for attribute, original, ours in FUNCTIONS:
            # `is original`: a family that defines its own function of this name keeps it.
            if getattr(module, attribute, None) is original and module is not sys.modules[original.__module__]:
                replace(module, attribute, ours)
        for file, attribute, ours in KERNELS:
            # None: there is no Metal, hence no kernel.
            if module is sys.modules.get(file) and getattr(module, attribute) not in (None, ours):
                replace(module, attribute, ours)
    for owner, attribute, ours in GATHERS if on_gpu() else ():
        if getattr(owner, attribute) is not ours:
            replace(owner, attribute, ours)
    for owner, call in sixteen_bits.METHODS:
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
    # On a CPU mlx composes attention of plain operations and rounds queries, scores and weights to 16 bits; on a GPU,
    # and in training, they stay in float32.
    wide = (x.astype(mx.float32) for x in (queries, keys, values))
    return MLX_LM_ATTENTION(*wide, cache=cache, scale=scale, mask=mask, sinks=sinks).astype(values.dtype)


def _training_inputs(keys: mx.array, values: mx.array, cache: Any, mask: Any) -> AttentionInputs | None:
    """The inputs of blocked attention; None if the call is not training's, or the model has changed what our caches
    returned."""
    if isinstance(cache, (PrefixRecorder, PrefixReader)):
        return cache.attention_inputs(keys, values, mask)
    # Without a cache and with a causal mask over several tokens: whole rows, prompt and completion together. They are
    # padded on the right, where causality hides the padding, so "causal" is the complete mask.
    whole_rows = cache is None and isinstance(mask, str) and keys.shape[2] > 1
    return AttentionInputs(keys, values) if whole_rows else None


def _pays(queries: mx.array, keys: mx.array) -> bool:
    """True if a decoding step has enough scores for `decode_attention` to be faster than mlx's attention."""
    return exp_is_scalar() and queries.shape[0] * queries.shape[1] * keys.shape[2] >= MIN_SCORES


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up in vectors, where mlx's exp takes one number at a time; rounded once in 16 bits; mlx-lm's own
    otherwise."""
    # Our backward passes do not sum over broadcast axes.
    if gate.shape != up.shape:
        return MLX_LM_SWIGLU(gate, up)
    has_16_bits = gate.dtype != mx.float32
    # In 16 bits at any size, for small decoding steps must round as large batches do.
    if exp_is_scalar() and (gate.size >= MIN_SWIGLU or has_16_bits):
        return vector_swiglu.swiglu(gate, up)
    return swiglu_16(gate, up) if has_16_bits else MLX_LM_SWIGLU(gate, up)  # pyright: ignore[reportReturnType]


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
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule in chunks wherever a row has several tokens or no state before it: in training, in eval and
    in train mode alike, and in prefill. A decoding step, one token after a state, is mlx-lm's own."""
    if state is not None and q.shape[1] == 1:
        return MLX_LM_GATED_DELTA(
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            state,
            mask,
            use_kernel=use_kernel,
            lower_bound=lower_bound,
            allow_neg_eigval=allow_neg_eigval,
        )
    # The logarithms of mlx-lm's `compute_g` and `compute_lower_bound_g`, in their types: the step's decay is exp of the
    # same numbers.
    rate = mx.exp(A_log.astype(mx.float32))
    if lower_bound is None:
        log_decay = -rate * nn.softplus(a + dt_bias)
    else:
        log_decay = lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
    beta = mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)
    return gated_delta_rule(q, k, v, log_decay, beta, state, mask)


def wkv7(
    r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """RWKV-7's recurrence token by token, as mlx-lm computes it where it has no kernel. r to b: [B, T, H, d]; state [B,
    H, d, d]."""
    outs: list[mx.array] = []
    for t in range(r.shape[1]):
        out, state = rwkv7._wkv7_step_ops(r[:, t], w[:, t], k[:, t], v[:, t], a[:, t], b[:, t], state)
        outs.append(out)
    return mx.stack(outs, axis=1).astype(r.dtype), state


FUNCTIONS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("scaled_dot_product_attention", MLX_LM_ATTENTION, scaled_dot_product_attention),
    ("swiglu", MLX_LM_SWIGLU, swiglu),
    ("gated_delta_update", MLX_LM_GATED_DELTA, gated_delta_update),
)
"""(attribute, mlx-lm's, ours)."""

KERNELS: tuple[tuple[str, str, Callable[..., Any] | None], ...] = (
    ("mlx_lm.models.rwkv7", "wkv7_kernel", wkv7),
    ("mlx_lm.models.kimi_k3", "_attn_res_kernel", None),
    ("mlx_lm.models.deepseek_v41", "_sinkhorn_kernel", None),
)
"""(file, attribute, ours): Metal kernels without a gradient, each used by the one file that defines it. None: mlx-lm's
code takes its plain operations where the kernel is None."""
GATHERS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (nn.Embedding, "__call__", gathers.embedding_call),
    (LoRAEmbedding, "__call__", gathers.lora_embedding_call),
    (switch_layers, "_gather_sort", gathers.gather_sort),
    (switch_layers, "_scatter_unsort", gathers.scatter_unsort),
)
"""(owner, attribute, ours)."""
