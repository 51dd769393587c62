"""A low-rank adapter beside a product, in one kernel: base + (x Aᵀ) B, and what follows it.

In plain mlx the adapter is two products, and a residual or a gate a third kernel.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.metal.kernel import MetalKernel
from backend.engine.patches import swiglu

GROUP = 256
"""Threads of a threadgroup: 8 simdgroups of 32."""
TILE = 1024
"""Outputs of a threadgroup."""
MOST_RANKS = 64
"""Ranks up to which every threadgroup can compute x Aᵀ for itself: R times K products for `TILE` outputs."""

NOTHING, RESIDUAL, GATE = range(3)
"""What follows the sum: nothing, the residual stream is added, or the outputs' halves become silu(first) · second."""

BODY = """
    // Threadgroup (tile, row): first its row's R numbers x A^T, a simdgroup for each in turn, then TILE outputs, one a thread.
    threadgroup float thin[R];
    const int row = threadgroup_position_in_grid.y;
    const int lane = thread_index_in_simdgroup;
    for (int r = simdgroup_index_in_threadgroup; r < R; r += GROUP / 32) {
      float sum = 0.0f;
      for (int k = lane; k < K; k += 32) {
        sum += float(x[row * K + k]) * float(a[r * K + k]);
      }
      sum = simd_sum(sum);
      if (lane == 0) {
        thin[r] = float(T(sum));
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    constexpr int OUTPUTS = AFTER == 2 ? N / 2 : N;
    const int first = threadgroup_position_in_grid.x * TILE + thread_position_in_threadgroup.x;
    for (int n = first; n < OUTPUTS && n < first + TILE; n += GROUP) {
      float y = float(base[row * N + n]);
      for (int r = 0; r < R; ++r) {
        y += thin[r] * float(b[r * N + n]);
      }
      y = float(T(y));
      if (AFTER == 1) {
        y += float(residual[row * N + n]);
      }
      if (AFTER == 2) {
        float up = float(base[row * N + OUTPUTS + n]);
        for (int r = 0; r < R; ++r) {
          up += thin[r] * float(b[r * N + OUTPUTS + n]);
        }
        y = y / (1.0f + metal::exp(-y)) * float(T(up));
      }
      out[row * OUTPUTS + n] = T(y);
    }
"""

KERNEL = MetalKernel("grpo_adapter", ("base", "x", "a", "b", "residual"), ("out",), BODY)


def adapted_plain(
    base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array, after: int, residual_BN: mx.array | None = None
) -> mx.array:
    """The same in plain mlx."""
    y_BN = mx.addmm(base_BN, x_BK @ a_RK.T, b_RN)
    if after == GATE:
        return swiglu(*mx.split(y_BN, 2, axis=-1))
    return y_BN if residual_BN is None else residual_BN + y_BN


def adapted(
    base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array, after: int, residual_BN: mx.array | None = None
) -> mx.array:
    """base + (x Aᵀ) B and what comes `after`, [B, N], or [B, N/2] after a gate. Rounded where the learner rounds: x Aᵀ, the sum, and the
    result."""
    launch = adapter_launch(base_BN, x_BK, a_RK, b_RN, after, residual_BN)
    return KERNEL(**launch)[0]


def adapter_launch(
    base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array, after: int, residual_BN: mx.array | None = None
) -> dict[str, Any]:
    (B, N), (R, K) = base_BN.shape, a_RK.shape
    outputs = N // 2 if after == GATE else N
    return {
        "arrays": [base_BN, x_BK, a_RK, b_RN, base_BN if residual_BN is None else residual_BN],
        "outputs": [((B, outputs), base_BN.dtype)],
        "constants": {"T": base_BN.dtype, "K": K, "N": N, "R": R, "AFTER": after, "GROUP": GROUP, "TILE": TILE},
        "threads": (-(-outputs // TILE) * GROUP, B, 1),
        "group": (GROUP, 1, 1),
    }
