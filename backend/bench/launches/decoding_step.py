"""Counts what a decoding step of Qwen3 with LoRA launches on Metal; launches decide its speed on a GPU at these sizes.

A count, not a measurement: it is the same on every machine. A model of one and of two layers is traced; every further layer launches
what the second one does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3
from mlx_lm.tuner.utils import linear_to_lora_layers

from backend.bench.launches.count import launches
from backend.bench.launches.metal import Gpu
from backend.bench.launches.trace import TracedStep, as_on_a_gpu, traced
from backend.bench.tables import TextTable
from backend.engine import residual_stream
from backend.engine.model_probe import split
from backend.generation import fused_model
from backend.generation.rollout import Rollout
from backend.generation.sampler import Sampling

DEFAULTS = Sampling(top_p=0.95, top_k=20)
"""How the settings sample unless told otherwise."""


@dataclass(frozen=True)
class Size:
    """The sizes of a Qwen3, of which the split of matrix products and sorts depends."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    layers: int


QWEN3_600M = Size(hidden=1024, intermediate=3072, heads=16, kv_heads=8, head=128, vocabulary=151_936, layers=28)
SMALL = Size(hidden=64, intermediate=128, heads=2, kv_heads=1, head=64, vocabulary=1024, layers=28)


class UntriedRollout(Rollout):
    """Without the trial that compares its decoding with the model: a trace needs no result."""

    def _batching_obstacle(self) -> str:
        return ""


def qwen3_policy(
    *, bits: int | None, size: Size = SMALL, dora: bool = False, layers: int = 2, dtype: mx.Dtype = mx.bfloat16
) -> Any:
    """A Qwen3 with LoRA of rank 8 on every projection, as an object with what a rollout reads of a policy. Random weights."""
    args = qwen3.ModelArgs(
        model_type="qwen3", hidden_size=size.hidden, num_hidden_layers=layers, intermediate_size=size.intermediate,
        num_attention_heads=size.heads, rms_norm_eps=1e-6, vocab_size=min(size.vocabulary, 1024),
        num_key_value_heads=size.kv_heads, max_position_embeddings=4096, rope_theta=1e6, head_dim=size.head,
        tie_word_embeddings=True,
    )  # fmt: skip
    mx.random.seed(0)
    model = qwen3.Model(args)
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, 64, bits)
    model.freeze()
    linear_to_lora_layers(model, layers, {"rank": 8, "scale": 20.0, "dropout": 0.0}, use_dora=dora)
    model.eval()
    mx.eval(model.parameters())
    split_model = split(model)
    return SimpleNamespace(
        model=model, split_model=split_model, hidden=split_model.hidden, logits=split_model.logits,
        tokenizer=None, eos_ids=[1], pad_id=0,
    )  # fmt: skip


class Blocks(Enum):
    """What computes a decoding step; the value is the table's heading."""

    OWN = "the model's own blocks"
    FUSED = "fused blocks"
    KERNELS = "with our kernels"


def step_launches(
    blocks: Blocks,
    *,
    bits: int | None,
    size: Size = QWEN3_600M,
    dora: bool = False,
    sampling: Sampling = DEFAULTS,
    rows: int = 8,
    gpu: Gpu | None = None,
) -> Counter[str]:
    """Kernel → launches of one decoding step of `rows` rows with room for 512 positions."""
    # The residual stream is what it is on a Metal that has our kernels, or on a GPU without them.
    with mock.patch.object(residual_stream, "costs_nothing", lambda: blocks is Blocks.KERNELS):
        policies = [qwen3_policy(bits=bits, size=size, dora=dora, layers=n) for n in (1, 2)]
        one, two = (launches(_traced(policy, blocks, size, sampling, rows), gpu) for policy in policies)
    # Counter's own `-` would drop what is negative; a layer launches no less than nothing.
    return Counter({name: one[name] + (size.layers - 1) * (two[name] - one[name]) for name in one | two})


def _traced(policy: Any, blocks: Blocks, size: Size, sampling: Sampling, rows: int, columns: int = 512) -> TracedStep:
    # A trial's products must agree with themselves only, and a CPU's quantised ones take minutes at these sizes.
    with as_on_a_gpu(stand_ins=False), mock.patch.object(mx, "quantized_matmul", _some_product):
        if blocks is Blocks.OWN:
            with mock.patch.object(fused_model, "is_plain_block", lambda block: False):
                rollout = UntriedRollout(policy, max_tokens=8)
        else:
            rollout = UntriedRollout(policy, max_tokens=8)
    assert not rollout.slow_paths and rollout.fused.packs_cache is (blocks is not Blocks.OWN)
    rollout.use_kernels(blocks is Blocks.KERNELS)
    rollout.fused.refresh()
    _enlarge_vocabulary(policy.model, size.vocabulary)
    arrays = step_arrays(rollout, size, rows, columns)
    trace = traced(rollout.compiled_step(sampling), *arrays, has_metal=blocks is Blocks.KERNELS)
    rollout.fused.release()
    return trace


def _some_product(x: mx.array, w: mx.array, *_: Any, **how: Any) -> mx.array:
    return mx.broadcast_to(x.sum(axis=-1, keepdims=True), (*x.shape[:-1], len(w)))


def step_arrays(rollout: Rollout, size: Size, rows: int, columns: int) -> list[Any]:
    """Arguments of a compiled step: tokens, slot, padding, uniforms, columns, keys and values."""
    layers, dtype = rollout.policy.model.layers, rollout.policy.model.layers[0].input_layernorm.weight.dtype
    if rollout.fused.packs_cache:
        caches = [[mx.zeros((rows, size.kv_heads, 2, columns, size.head), dtype) for _ in layers], []]
    else:
        caches = [[mx.zeros((rows, size.kv_heads, columns, size.head), dtype) for _ in layers] for _ in range(2)]
    zeros = mx.zeros(rows, mx.int32)
    return [zeros, mx.array(columns - 2), zeros, mx.zeros(rows), mx.arange(columns), *caches]


def _enlarge_vocabulary(model: Any, vocabulary: int) -> None:
    """Embeddings of the real size, which the trial passes of `Rollout` need not read."""
    embedding = model.model.embed_tokens
    for name, array in embedding.items():
        if isinstance(array, mx.array):
            embedding[name] = mx.zeros((vocabulary, *array.shape[1:]), array.dtype)
    mx.eval(embedding.parameters())  # or making them would be operations of the trace


def table(bits: int | None = 4, dora: bool = False, rows: int = 8, gpu: Gpu | None = None) -> TextTable:
    """The launches of a step by kernel, for each kind of block."""
    counted = [step_launches(blocks, bits=bits, dora=dora, rows=rows, gpu=gpu) for blocks in Blocks]
    kernels = sorted(set().union(*counted), key=lambda name: -max(c[name] for c in counted))
    lines = [[name, *(str(c[name] or "–") for c in counted)] for name in kernels]
    lines.append(["all", *(str(c.total()) for c in counted)])
    base, adapter = f"{bits}-bit" if bits else "bf16", "DoRA" if dora else "LoRA"
    title = f"Launches of a decoding step on Metal: Qwen3-0.6B, {base}, {adapter}, {rows} rows"
    return TextTable(title, ["kernel", *(blocks.value for blocks in Blocks)], lines)
