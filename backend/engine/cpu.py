"""x86 stand-ins for what mlx computes slowly there.

Exponentials: mlx's is scalar on x86 (13 ns). e^x = 2^n · 2^r, n the nearest whole number to x · log2 e, 2^r a
polynomial on [−½, ½]. mlx ends a fusion at depth 11, and a constant beyond it makes the kernel three times slower: the
longest chain has ten operations.
Small products: OpenBLAS packs both factors unless the product is small, so W is taken as a batch of slices (a view).
Sums of rows are products with ones: mlx's take 1.8 ns a number.
RMS norms: one square root a row.
"""

import math
import shutil
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.chunk_sizes import STORED_WIDTH
from backend.engine.device import on_cpu, on_x86
from backend.engine.graph import compiled_by_shape

COMPILER = "g++"
# mlx's errors where the compiler left no library, as one does that a signal has ended
LEFT_NOTHING = ("Could not load C++ shared library", "Failed to execute command with return code")
_SLOWER = "so compiled functions run one operation at a time, and sampling takes somewhat longer"


def left_nothing(error: RuntimeError) -> bool:
    """True if mlx raised this because its compiler failed or was interrupted."""
    return str(error).startswith(LEFT_NOTHING)


@cache
def check_compiler() -> str:
    """Try mlx's compiler (g++); turn compiling off if it fails. Returns a sentence if nothing is compiled, else ""."""
    if not on_cpu():
        return ""
    if shutil.which(COMPILER) is None:
        return f"{COMPILER} is not installed, {_SLOWER}."
    try:
        mx.eval(mx.compile(lambda x: mx.exp(x) + x)(mx.zeros((2, 2))))
    except RuntimeError:
        mx.disable_compile()
        return f"{COMPILER} is installed but cannot compile (are the C++ headers missing?), {_SLOWER}."
    return ""


LOG2_E = 1 / math.log(2)

# 2^r as a polynomial in r (Remez): relative error below 1e-7 on [−½, ½]
EXP2_COEFFICIENTS = (1.0, 0.6931469776, 0.2402224209, 0.0555073374, 0.0096715126, 0.0013264727)

MIN_EXPONENT = -127.0  # its bits are all zero: the number 0

# has no fraction bits: adding it rounds to a whole number, plus float32's bias of 127
ROUND_AND_BIAS = 1.5 * 2.0**23 + 127

SAME_LOW_BITS = ROUND_AND_BIAS + 512  # with the same last 9 bits: the same sum in two kernels would become a third one


def exp_is_scalar() -> bool:
    return on_x86()


def exp_nonpositive(x: mx.array) -> mx.array:
    """e^x for float32 x ≤ 0, as exact as mlx's; below the smallest normal float32 0. No gradient."""
    return _exp(x) if exp_is_scalar() else mx.exp(x)


def exp_clipped(x: mx.array) -> mx.array:
    """e^x for any float32 x, at most 2^127. For use under `compiled_by_shape`."""
    return _exp2(mx.clip(x * LOG2_E, MIN_EXPONENT, -MIN_EXPONENT))


def _exp2(y: mx.array) -> mx.array:
    # The sum is a whole number below 2^24. Shifting by 23 moves its low byte, n + 127 ≤ 254, into the exponent field
    # and pushes everything above it out.
    power = mx.left_shift((y + SAME_LOW_BITS).astype(mx.int32), 23).view(mx.float32)
    # (y + ROUND_AND_BIAS) − ROUND_AND_BIAS is exactly n, so r = y − n lies in [−½, ½].
    r = y - ((y + ROUND_AND_BIAS) - ROUND_AND_BIAS)
    value: Any = EXP2_COEFFICIENTS[-1]
    for coefficient in reversed(EXP2_COEFFICIENTS[1:-1]):  # Horner, but for the last step
        value = value * r + coefficient
    # The last step, with both terms times 2^n: that changes their exponents only, so it adds no rounding error, and the
    # kernel is one operation less deep than with a product at the end. n = −127 gives the bits of 0.
    result = value * (r * power) + power
    return mx.contiguous(result)  # copies nothing, and ends the fusion


@compiled_by_shape
def _exp(x: mx.array) -> mx.array:
    # One bound suffices for x ≤ 0. It also turns −inf, a masked score, into 2^−127, which has the bits of 0.
    return _exp2(mx.maximum(x * LOG2_E, MIN_EXPONENT))


def row_sums(x: mx.array) -> mx.array:
    """Sums over the last axis, [..., 1], of float32."""
    # From numpy the ones are a constant of a compiled step; mx.ones would be an operation in each.
    return x @ mx.array(np.ones((x.shape[-1], 1), np.float32)) if on_x86() else x.sum(axis=-1, keepdims=True)


MIN_NORM = 1 << 12  # numbers of a norm from which one more operation pays


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x / rms(x) · weight over the last axis, in the type of x. On x86 with one square root a row: mlx's fused kernel
    computes it for every number; `contiguous` ends the fusion before the product."""
    if x.dtype != mx.float32 or x.size < MIN_NORM or not on_x86():
        return mx.fast.rms_norm(x, None, eps) * weight
    return x * mx.contiguous(mx.rsqrt(x.square().mean(axis=-1, keepdims=True) + eps)) * weight


# OpenBLAS multiplies up to this rows · columns · inner and rows · columns without packing
UNPACKED_FLOPS, UNPACKED_SIZE = 10**6, 1024

MIN_WIDTH, MAX_WIDTH = 32, 512  # columns of a slice

MAX_ROWS = 16  # with more rows packing costs little


def sliced(weight: mx.array) -> mx.array:
    """W [out, in] in the layout with which `matmul_transposed` is fastest, a copy: on x86 in float32 [out /
    STORED_WIDTH, in, STORED_WIDTH]; else, or where `out` is not a multiple, W itself."""
    outer, inner = weight.shape
    if outer % STORED_WIDTH or weight.dtype != mx.float32 or not on_x86():
        return weight
    return mx.contiguous(weight.reshape(-1, STORED_WIDTH, inner).swapaxes(1, 2))


def matmul_transposed(x: mx.array, weight: mx.array) -> mx.array:
    """[…, in] times the transpose of W [out, in] or `sliced(W)`; in slices for few float32 rows on x86."""
    *before, inner = x.shape
    rows, slices = x.size // inner, weight
    if weight.ndim == 2:
        width = slice_width(rows, *reversed(weight.shape)) if x.dtype == weight.dtype == mx.float32 and on_x86() else 0
        if not width:
            return x @ weight.T
        # Transposed views: BLAS takes the transposition as a flag, so W is read where it is.
        slices = weight.reshape(-1, width, inner).swapaxes(1, 2)
    return (x.reshape(1, rows, inner) @ slices).swapaxes(0, 1).reshape(*before, -1)


def slice_width(rows: int, inner: int, outer: int) -> int:
    """Rows of W in a slice, the most that make an unpacked product; 0 where none do, or all of W does."""
    width = MAX_WIDTH if rows <= MAX_ROWS else 0
    while width >= MIN_WIDTH and (
        rows * width > UNPACKED_SIZE or rows * width * inner > UNPACKED_FLOPS or outer % width
    ):
        width //= 2
    return width if MIN_WIDTH <= width < outer else 0


def _sigmoid(x: mx.array) -> mx.array:
    return 1 / (1 + exp_clipped(-x)) if exp_is_scalar() else mx.sigmoid(x)


@compiled_by_shape
def swiglu_forward(gate: mx.array, up: mx.array) -> mx.array:
    """`swiglu` without a gradient."""
    gate_32 = gate.astype(mx.float32)
    return (gate_32 * _sigmoid(gate_32) * up.astype(mx.float32)).astype(up.dtype)


@compiled_by_shape
def _backward(gate: mx.array, up: mx.array, d_out: mx.array) -> tuple[mx.array, mx.array]:
    gate_32, up_32, d_out_32 = (x.astype(mx.float32) for x in (gate, up, d_out))
    sigmoid = _sigmoid(gate_32)
    silu = gate_32 * sigmoid
    d_gate = d_out_32 * up_32 * (sigmoid + silu - silu * sigmoid)  # silu' = σ + g σ (1 − σ)
    return d_gate.astype(gate.dtype), (d_out_32 * silu).astype(up.dtype)


@mx.custom_function
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up, elementwise, of any shape they share, rounded once to the type of `up`."""
    return swiglu_forward(gate, up)


@swiglu.vjp
def _swiglu_vjp(primals: Any, d_out: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
    return _backward(*primals, d_out)
