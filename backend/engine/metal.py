"""Kernels of our own for a decoding step on Metal, each with the same computation in plain mlx."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from backend.engine.cpu import rms_norm

Shaped = tuple[tuple[int, ...], mx.Dtype]


@dataclass(frozen=True, slots=True)
class MetalKernel:
    """`inputs` and `outputs` are row-major arrays of any shape."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str

    def __call__(
        self,
        arrays: Sequence[mx.array],
        outputs: Sequence[Shaped],
        constants: dict[str, Any],
        threads: tuple[int, int, int],
        group: tuple[int, int, int],
    ) -> list[mx.array]:
        kernel: Any = mx.fast.metal_kernel(
            name=self.name, input_names=list(self.inputs), output_names=list(self.outputs), source=self.body
        )
        return kernel(
            inputs=list(arrays),
            template=list(constants.items()),
            grid=threads,
            threadgroup=group,
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )


HEADS = """
    // A simdgroup for each head of each row: the sum of squares over its lanes, then pairs (e, e + D/2) turned
    // together.
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
          first = float(T(float(T(first * scale)) * float(weight[head * D + e])));
          second = float(T(float(T(second * scale)) * float(weight[head * D + HALF + e])));
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

HEADS_KERNEL = MetalKernel("grpo_heads", ("qkv", "rotation", "weight", "eps"), ("queries", "kv"), HEADS)


@dataclass(frozen=True, slots=True)
class Heads:
    """H query heads, J key heads and J value heads of `size`, in that order."""

    queries: int
    keys: int
    size: int

    @property
    def all(self) -> int:
        return self.queries + 2 * self.keys


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of queries and keys (Qwen3): `weight` [H + J, 1, size]."""

    weight: mx.array
    eps: float


def rotated_heads_plain(
    heads_BN1d: mx.array, rotation_B2d: mx.array, heads: Heads, norms: HeadNorms | None
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries [B, H, 1, d], keys and values [B, J, 1, d], from their projection; queries and keys normed and rotated
    (`StepContext.rotation`). Rounded where the learner rounds."""
    x, values = mx.split(heads_BN1d, [heads.queries + heads.keys], axis=1)
    if norms:
        x = rms_norm(x, norms.weight, norms.eps)
    # Each half of a head, times both halves of its rotation.
    of_first, of_second = mx.split(rotation_B2d.reshape(len(x), 1, 2, 2, -1), 2, axis=2)
    first, second = mx.split(x.astype(mx.float32), 2, axis=-1)
    x = (first * of_first.squeeze(2) + second * of_second.squeeze(2)).astype(x.dtype).reshape(x.shape)
    queries, keys = mx.split(x, [heads.queries], axis=1)
    return queries, keys, values


def rotated_heads(
    qkv_B1E: mx.array, rotation_B2d: mx.array, heads: Heads, norms: HeadNorms | None
) -> tuple[mx.array, mx.array]:
    """Queries [B, H, 1, d], and keys and values [B, J, 2, 1, d], from a projection [B, 1, (H + 2J) d]:
    `rotated_heads_plain` in one kernel of our own."""
    B, H, J, size, dtype = len(qkv_B1E), heads.queries, heads.keys, heads.size, qkv_B1E.dtype
    # Without norms the body reads no weights; the rotation takes their place.
    weight = norms.weight if norms else rotation_B2d
    queries, kv = HEADS_KERNEL(
        [qkv_B1E, rotation_B2d, weight, mx.array([norms.eps if norms else 0.0])],
        [((B, H, 1, size), dtype), ((B, J, 2, 1, size), dtype)],
        {"T": dtype, "D": size, "H": H, "J": J, "HAS_NORMS": norms is not None},
        threads=(32, heads.all, B),
        group=(32, 1, 1),
    )
    return queries, kv


GROUP = 256  # threads of a threadgroup: 8 simdgroups of 32
TILE = 1024  # outputs of a threadgroup
MOST_RANKS = 64  # up to which every threadgroup computes x Aᵀ for itself

NOTHING, GATE = range(2)  # after the sum: nothing, or silu(first half) · second half

THIN = """
    // Threadgroup (tile, row): first its row's R numbers x A^T, a simdgroup for each in turn, then TILE outputs, one
    // a thread.
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

ADAPTER_KERNEL = MetalKernel(
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


def adapted(base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array, after: int) -> mx.array:
    """base + (x Aᵀ) B and what comes `after`, [B, N], or [B, N/2] after a gate. Rounded where the learner rounds."""
    B, N = base_BN.shape
    outputs = N // 2 if after == GATE else N
    return _run_adapter(
        ADAPTER_KERNEL, [base_BN, x_BK, a_RK, b_RN], [((B, outputs), base_BN.dtype)], outputs, {"AFTER": after}
    )[0]


def added(
    stream_BN: mx.array, base_BN: mx.array, x_BK: mx.array, a_RK: mx.array, b_RN: mx.array
) -> tuple[mx.array, mx.array]:
    """stream + (base + (x Aᵀ) B), [B, N]: in float32, and in the type of `base`."""
    arrays = [base_BN, x_BK, a_RK, b_RN, stream_BN]
    shaped = [(base_BN.shape, mx.float32), (base_BN.shape, base_BN.dtype)]
    total, rounded = _run_adapter(STREAM_KERNEL, arrays, shaped, base_BN.shape[1], {})
    return total, rounded


def _run_adapter(
    kernel: MetalKernel, arrays: list[mx.array], shaped: list[Shaped], outputs: int, constants: dict[str, Any]
) -> list[mx.array]:
    (B, N), (R, K), dtype = arrays[0].shape, arrays[2].shape, arrays[0].dtype
    constants = {"T": dtype, "K": K, "N": N, "R": R, "GROUP": GROUP, "TILE": TILE} | constants
    return kernel(arrays, shaped, constants, threads=(-(-outputs // TILE) * GROUP, B, 1), group=(GROUP, 1, 1))


def summed(stream_BN: mx.array, y_BN: mx.array) -> tuple[mx.array, mx.array]:
    """stream + y in float32 and in the type of y, in one kernel."""
    total, rounded = SUM_KERNEL(
        [y_BN, stream_BN],
        [(y_BN.shape, mx.float32), (y_BN.shape, y_BN.dtype)],
        {"T": y_BN.dtype, "SIZE": y_BN.size},
        threads=(-(-y_BN.size // GROUP) * GROUP, 1, 1),
        group=(GROUP, 1, 1),
    )
    return total, rounded
