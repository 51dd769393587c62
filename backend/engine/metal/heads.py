"""Queries, keys and values of one token a row, from the projection of all three: norm, rotary embedding and the cache's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from backend.engine.metal.kernel import MetalKernel

BODY = """
    // A simdgroup for each head of each row: the sum of squares over its lanes, then pairs (e, e + D/2) turned together.
    constexpr int HALF = D / 2;
    const int lane = thread_position_in_threadgroup.x;
    const int head = thread_position_in_grid.y;
    const int row = thread_position_in_grid.z;
    const bool is_value = head >= H + J;
    const int in = (row * (H + 2 * J) + head) * D;

    float scale = 1.0f;
    if (HAS_NORMS && !is_value) {
      float sum = 0.0f;
      for (int e = lane; e < D; e += 32) {
        sum += float(qkv[in + e]) * float(qkv[in + e]);
      }
      scale = metal::rsqrt(simd_sum(sum) / D + eps[0]);
    }
    for (int e = lane; e < HALF; e += 32) {
      float first = float(qkv[in + e]);
      float second = float(qkv[in + HALF + e]);
      if (!is_value) {
        if (HAS_NORMS) {
          first = float(T(float(T(first * scale)) * float(head < H ? q_weight[e] : k_weight[e])));
          second = float(T(float(T(second * scale)) * float(head < H ? q_weight[HALF + e] : k_weight[HALF + e])));
        }
        const int turn = row * 2 * D + e;
        const float turned = first * rotation[turn] + second * rotation[turn + D];
        second = first * rotation[turn + HALF] + second * rotation[turn + D + HALF];
        first = turned;
      }
      if (head < H) {
        queries[(row * H + head) * D + e] = T(first);
        queries[(row * H + head) * D + HALF + e] = T(second);
      } else {
        const int out = ((row * J + (head - H) % J) * 2 + (is_value ? 1 : 0)) * D;
        kv[out + e] = T(first);
        kv[out + HALF + e] = T(second);
      }
    }
"""

KERNEL = MetalKernel("grpo_heads", ("qkv", "rotation", "q_weight", "k_weight", "eps"), ("queries", "kv"), BODY)


@dataclass(frozen=True, slots=True)
class Heads:
    """H query heads, J key heads and J value heads, each `size` long, behind each other in that order."""

    queries: int
    keys: int
    size: int

    @property
    def all(self) -> int:
        return self.queries + 2 * self.keys


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of queries and keys (Qwen3): weights [size]."""

    queries: mx.array
    keys: mx.array
    eps: float


def rotated_heads_plain(
    qkv_BE: mx.array, rotation_B2d: mx.array, heads: Heads, norms: HeadNorms | None
) -> tuple[mx.array, mx.array]:
    """Queries [B, H, 1, d] and keys|values [B, J, 1, 2d] from a projection [B, (H + 2J) d]; queries and keys normed and rotated.

    Three kernels (two without norms), each reading and writing once: a weightless norm over all heads, since those of the queries
    alone lie apart and would be copied first, then queries and keys|values as elementwise products with the rotation
    (`StepContext.rotation`). Values pass through. Rounded where the learner rounds: after the norm, its weight, and the rotation.
    """
    B, (H, J, size) = len(qkv_BE), (heads.queries, heads.keys, heads.size)
    half = size // 2
    split_BA2e = qkv_BE.reshape(B, heads.all, 2, half)
    # Axes of length 1 come first, where they cost nothing: between elementwise operations any view would end a kernel.
    values_BJ12e = split_BA2e[:, H + J :, None]
    if norms:
        split_BA2e = mx.fast.rms_norm(qkv_BE.reshape(B, heads.all, size), None, norms.eps).reshape(split_BA2e.shape)
    queries_BH2e, keys_BJ12e = split_BA2e[:, :H], split_BA2e[:, H : H + J, None]
    turned = _turned(queries_BH2e, rotation_B2d.reshape(B, 2, 1, 2, half), norms and norms.queries)
    queries = turned.astype(qkv_BE.dtype).reshape(B, H, 1, size)
    turned = _turned(keys_BJ12e, rotation_B2d.reshape(B, 2, 1, 1, 2, half), norms and norms.keys)
    is_key = mx.array([True, False]).reshape(2, 1, 1)
    kv = mx.where(is_key, turned, values_BJ12e.astype(mx.float32)).astype(qkv_BE.dtype)
    return queries, kv.reshape(B, J, 1, 2 * size)


def _turned(heads: mx.array, rotation: mx.array, weight: mx.array | None) -> mx.array:
    """Heads [B, N, …, 2, half] times the norm's weight, rotated, in float32. `rotation` [B, 2, 1, …, 2, half]."""
    half = heads.shape[-1]
    parts = [heads[..., i : i + 1, :] for i in (0, 1)]
    if weight is not None:
        parts = [part * weight[i * half : (i + 1) * half] for i, part in enumerate(parts)]
    parts = [part.astype(mx.float32) for part in parts]
    return parts[0] * rotation[:, 0] + parts[1] * rotation[:, 1]


def rotated_heads(
    qkv_BE: mx.array, rotation_B2d: mx.array, heads: Heads, norms: HeadNorms | None
) -> tuple[mx.array, mx.array]:
    """The same in one kernel of our own."""
    queries, kv = KERNEL(**heads_launch(qkv_BE, rotation_B2d, heads, norms))
    return queries, kv


def heads_launch(qkv_BE: mx.array, rotation_B2d: mx.array, heads: Heads, norms: HeadNorms | None) -> dict[str, Any]:
    B, (H, J, size), dtype = len(qkv_BE), (heads.queries, heads.keys, heads.size), qkv_BE.dtype
    unused = rotation_B2d  # in place of weights that the body does not read
    weights = [norms.queries, norms.keys] if norms else [unused, unused]
    return {
        "arrays": [qkv_BE, rotation_B2d, *weights, mx.array([norms.eps if norms else 0.0])],
        "outputs": [((B, H, 1, size), dtype), ((B, J, 1, 2 * size), dtype)],
        "constants": {"T": dtype, "D": size, "H": H, "J": J, "HAS_NORMS": norms is not None},
        "threads": (32, heads.all, B),
        "group": (32, 1, 1),
    }
