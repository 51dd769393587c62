"""A low-rank adapter beside a product, in one kernel: base + (x Aᵀ) B, and what follows it.

In plain mlx the adapter is two products, a gate a third kernel, and the residual stream in float32 (`backend.engine.residual_stream`)
a third and a fourth: a sum, and its rounding.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.metal.heads import MetalKernel
from backend.engine.patches import swiglu

GROUP = 256
"""Threads of a threadgroup: 8 simdgroups of 32."""
TILE = 1024
"""Outputs of a threadgroup."""
MOST_RANKS = 64
"""Ranks up to which every threadgroup can compute x Aᵀ for itself: R times K products for `TILE` outputs."""

NOTHING, GATE = range(2)
"""What follows the sum: nothing, or the outputs' halves become silu(first) · second."""

THIN = """
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
    const int first = threadgroup_position_in_grid.x * TILE + thread_position_in_threadgroup.x;
"""

SUM = """
      float y = float(base[row * N + n]);
      for (int r = 0; r < R; ++r) {
        y += thin[r] * float(b[r * N + n]);
      }
      y = float(T(y));
"""

KERNEL = MetalKernel(
    "grpo_adapter",
    ("base", "x", "a", "b"),
    ("out",),
    f"""{THIN}
    constexpr int OUTPUTS = AFTER == {GATE} ? N / 2 : N;
    for (int n = first; n < OUTPUTS && n < first + TILE; n += GROUP) {{{SUM}
      if (AFTER == {GATE}) {{
        float up = float(base[row * N + OUTPUTS + n]);
        for (int r = 0; r < R; ++r) {{
          up += thin[r] * float(b[r * N + OUTPUTS + n]);
        }}
        y = y / (1.0f + metal::exp(-y)) * float(T(up));
      }}
      out[row * OUTPUTS + n] = T(y);
    }}
""",
)

STREAM_KERNEL = MetalKernel(
    "grpo_adapter_stream",
    ("base", "x", "a", "b", "stream"),
    ("sum", "rounded"),
    f"""{THIN}
    for (int n = first; n < N && n < first + TILE; n += GROUP) {{{SUM}
      y += float(stream[row * N + n]);
      sum[row * N + n] = y;
      rounded[row * N + n] = T(y);
    }}
""",
)

SUM_KERNEL = MetalKernel(
    "grpo_stream_sum",
    ("y", "stream"),
    ("sum", "rounded"),
    """
    const int i = thread_position_in_grid.x;
    if (i < SIZE) {
      const float total = float(y[i]) + float(stream[i]);
      sum[i] = total;
      rounded[i] = T(total);
    }
""",
)


def adapted_plain(base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array, after: int) -> mx.array:
    """The same in plain mlx."""
    y_BN = mx.addmm(base_BN, x_BK @ a_RK.T, b_RN)
    return swiglu(*mx.split(y_BN, 2, axis=-1)) if after == GATE else y_BN


def adapted(base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array, after: int) -> mx.array:
    """base + (x Aᵀ) B and what comes `after`, [B, N], or [B, N/2] after a gate. Rounded where the learner rounds: x Aᵀ, the sum, and the
    result."""
    return KERNEL(**adapter_launch(base_BN, x_BK, a_RK, b_RN, after))[0]


def adapter_launch(base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array, after: int) -> dict[str, Any]:
    B, N = base_BN.shape
    outputs = N // 2 if after == GATE else N
    launch = _launch(base_BN, x_BK, a_RK, b_RN, outputs)
    launch["constants"]["AFTER"] = after
    return launch | {"outputs": [((B, outputs), base_BN.dtype)]}


def added_plain(
    stream_BN: mx.array, base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array
) -> tuple[mx.array, mx.array]:
    """The same in plain mlx."""
    total_BN = stream_BN.astype(mx.float32) + mx.addmm(base_BN, x_BK @ a_RK.T, b_RN)
    return total_BN, total_BN.astype(base_BN.dtype)


def added(
    stream_BN: mx.array, base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array
) -> tuple[mx.array, mx.array]:
    """stream + (base + (x Aᵀ) B), [B, N]: in float32, and in the type of `base`. Rounded before that where the learner rounds: x Aᵀ and
    the sum with `base`."""
    total, rounded = STREAM_KERNEL(**stream_launch(stream_BN, base_BN, x_BK, a_RK, b_RN))
    return total, rounded


def stream_launch(
    stream_BN: mx.array, base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array
) -> dict[str, Any]:
    launch = _launch(base_BN, x_BK, a_RK, b_RN, base_BN.shape[1])
    launch["arrays"].append(stream_BN)
    return launch | {"outputs": [(base_BN.shape, mx.float32), (base_BN.shape, base_BN.dtype)]}


def summed(stream_BN: mx.array, y_BN: mx.array) -> tuple[mx.array, mx.array]:
    """stream + y in float32 and in the type of y, in one kernel: mlx's own have one result each."""
    total, rounded = SUM_KERNEL(**sum_launch(stream_BN, y_BN))
    return total, rounded


def sum_launch(stream_BN: mx.array, y_BN: mx.array) -> dict[str, Any]:
    return {
        "arrays": [y_BN, stream_BN],
        "outputs": [(y_BN.shape, mx.float32), (y_BN.shape, y_BN.dtype)],
        "constants": {"T": y_BN.dtype, "SIZE": y_BN.size},
        "threads": (-(-y_BN.size // GROUP) * GROUP, 1, 1),
        "group": (GROUP, 1, 1),
    }


def _launch(base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array, outputs: int) -> dict[str, Any]:
    (B, N), (R, K) = base_BN.shape, a_RK.shape
    return {
        "arrays": [base_BN, x_BK, a_RK, b_RN],
        "constants": {"T": base_BN.dtype, "K": K, "N": N, "R": R, "GROUP": GROUP, "TILE": TILE},
        "threads": (-(-outputs // TILE) * GROUP, B, 1),
        "group": (GROUP, 1, 1),
    }
