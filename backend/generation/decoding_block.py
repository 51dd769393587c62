"""A transformer block that computes a decoding step in fewer kernels; everything longer it leaves to the model's own block.

A step of one token a row is bound by launches on a GPU. This block computes what most decoders do, x + attention(norm(x)) and then
x + MLP(norm(x)), with the queries, keys and values normed and rotated in two kernels instead of four or more, and written into one cache
instead of two. Which blocks do that is seen from their parts, not from the model's name, and `backend.generation.fused_model` compares the result.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from backend.engine import residual_stream
from backend.engine.metal.heads import HeadNorms, Heads, rotated_heads, rotated_heads_plain
from backend.engine.slot_cache import PackedSlotCache, StepContext
from backend.generation.fused_linear import FusedOutput, LinearBranch, stream_sum

ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "rope"}
BLOCK_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class DecodingBlock(nn.Module):
    """Around a block of the model, which stays in the module tree, so that its arrays are inputs of a compiled step."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block
        attention = block.self_attn
        output = attention.q_proj.output
        size = rotated_size(attention.rope)
        self.heads = Heads(output.sizes[0] // size, output.sizes[1] // size, size)
        self.uses_kernels = False
        """Whether it runs kernels of our own (`backend.engine.metal`), which only Metal can."""
        self.rotate_as(attention.rope)

    def rotate_as(self, rope: Any) -> None:
        """Take the rotation of this embedding, which may be another block's if it is the same."""
        self.rope = lambda: rope  # in a function, or it would be a child

    def __getattr__(self, name: str) -> Any:
        """Models ask their blocks for more than a call (`layer.is_linear`)."""
        return self[name] if name in self else getattr(self.get("block"), name)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, *rest: Any, **more: Any) -> mx.array:
        if isinstance(cache, PackedSlotCache):
            return self.step(x, cache)
        return self.block(x, mask, cache, *rest, **more)

    def step(self, x_B1H: mx.array, cache: PackedSlotCache) -> mx.array:
        """One token a row. → the residual stream, rounded where `backend.engine.residual_stream` keeps it in float32: its float32 goes
        from block to block in the cache's step, so that the kernel of a sum writes both and no other kernel rounds."""
        block = self.block
        attention, mlp, heads = block.self_attn, block.mlp, self.heads
        normed = block.input_layernorm(x_B1H)
        stream_B1H = cache.step.stream_of(x_B1H)
        qkv = attention.q_proj.output.projection.step(normed, with_kernel=self.uses_kernels)
        rotation = cache.step.rotation(self.rope(), heads.size)
        rotate = rotated_heads if self.uses_kernels else rotated_heads_plain
        queries, kv = rotate(qkv[:, 0], rotation, heads, head_norms(attention))
        keys, values = cache.write(kv)
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=attention.scale, mask=cache.step.mask(heads.queries)
        )
        stream_B1H, x_B1H = self._added(stream_B1H, attention.o_proj, attended.reshape(len(x_B1H), 1, -1))
        normed = block.post_attention_layernorm(x_B1H)
        gated = mlp.gate_proj.output.projection.step(normed, is_gate=True, with_kernel=self.uses_kernels)
        cache.step.stream = stream_B1H, x_B1H = self._added(stream_B1H, mlp.down_proj, gated)
        return x_B1H

    def _added(self, stream: mx.array, layer: Any, x: mx.array) -> tuple[mx.array, mx.array]:
        """The residual stream after this branch, stream + layer(x), and what the next norm reads of it."""
        projection = layer.output.projection if isinstance(layer, LinearBranch) else None
        if residual_stream.is_float32(self.block.input_layernorm):
            if projection is None:
                return stream_sum(stream, layer(x), with_kernel=self.uses_kernels)
            return projection.stream_step(x, stream, with_kernel=self.uses_kernels)
        if projection is None:
            stream = stream + layer(x)
        else:
            stream = projection.added_step(x, stream, with_kernel=self.uses_kernels)
        return stream, stream


# ── which blocks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def is_plain_block(block: Any) -> bool:
    """Whether the block is made of the parts that `DecodingBlock.step` computes, and of no others."""
    if not isinstance(block, nn.Module) or set(block.children()) != BLOCK_PARTS:
        return False
    attention: Any = block.self_attn
    mlp: Any = block.mlp
    norms = [block.input_layernorm, block.post_attention_layernorm]
    return (
        all(type(norm) is nn.RMSNorm for norm in norms)
        and set(mlp.children()) == {"gate_proj", "up_proj", "down_proj"}
        and _shared_output(mlp.gate_proj, mlp.up_proj) is not None
        and _is_plain_attention(attention)
    )


def _is_plain_attention(attention: Any) -> bool:
    parts = set(attention.children())
    if parts - {"q_norm", "k_norm"} != ATTENTION_PARTS or not isinstance(getattr(attention, "scale", None), float):
        return False
    output, size = _shared_output(attention.q_proj, attention.k_proj, attention.v_proj), rotated_size(attention.rope)
    if output is None or not size or output.sizes[1] != output.sizes[2] or any(n % size for n in output.sizes):
        return False
    if parts == ATTENTION_PARTS:
        return True
    q_norm, k_norm = attention.get("q_norm"), attention.get("k_norm")
    return (
        all(type(norm) is nn.RMSNorm and norm.weight.shape == (size,) for norm in (q_norm, k_norm))
        and q_norm.eps == k_norm.eps
    )


def _shared_output(*branches: Any) -> FusedOutput | None:
    """The product that these layers, in this order and no others, are slices of."""
    if not all(isinstance(branch, LinearBranch) for branch in branches):
        return None
    output = branches[0].output
    is_whole = [branch.index for branch in branches] == list(range(output.count))
    return output if is_whole and all(branch.output is output for branch in branches) else None


def rotated_size(rope: Any) -> int:
    """The length of the heads that this rotary embedding rotates by halves; 0 for one that does not."""
    if getattr(rope, "traditional", False):
        return 0
    size = getattr(rope, "dims", None) or getattr(rope, "dim", 0)
    return size if isinstance(size, int) and size % 2 == 0 else 0


def head_norms(attention: Any) -> HeadNorms | None:
    if "q_norm" not in attention:
        return None
    return HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps)


def share_rotations(blocks: list[DecodingBlock]) -> None:
    """Let blocks whose rotary embeddings turn alike use one of them, so that a step computes its rotation once."""
    step = StepContext(mx.array(1000), mx.array([0, 700, 1000]), mx.arange(1))
    seen: dict[bytes, Any] = {}
    for block in blocks:
        rotation = step.rotation(block.rope(), block.heads.size)
        block.rotate_as(seen.setdefault(np.array(rotation).tobytes(), block.rope()))
