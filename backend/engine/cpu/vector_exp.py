"""exp for x86, where mlx has no vector version: softmax, sampling and swiglu spend most of their time in it.

mlx's `exp` is vectorised on Apple hardware and on GPUs, but computes one number at a time on an x86 CPU, 13 ns each. Additions,
products and shifts are vectorised there, so e^x is built from those: e^x = 2^n · 2^r, where n is the nearest whole number to
x · log2 e, 2^r is a polynomial on [−½, ½], and 2^n is put together from its bits. Other functions are not worth it.

**Compiled, three kernels.** mlx fuses elementwise operations into C++ loops, which the compiler vectorises where every operand is
contiguous or a constant of the loop. A constant beyond the depth at which mlx ends a fusion, 11 operations, becomes an operand that a
stride of 0 repeats, and the whole kernel takes three times as long. So the longest chain below has ten, and nothing that follows
is fused with it.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from backend.engine.compiled import compiled_by_shape
from backend.engine.device import on_x86

LOG2_E = 1 / math.log(2)

EXP2_COEFFICIENTS = (1.0, 0.6931469776, 0.2402224209, 0.0555073374, 0.0096715126, 0.0013264727)
"""2^r as a polynomial in r, exactly 1 at 0 (Remez exchange): relative error below 1e-7 on [−½, ½]."""

MIN_EXPONENT = -127.0
"""The exponent whose bits are all zero: the number 0."""

ROUND_AND_BIAS = 1.5 * 2.0**23 + 127
"""A float32 of this size has no fraction bits, so adding it rounds to the nearest whole number, which is then in the last
bits of the mantissa, plus 127, the bias of float32's exponent."""

SAME_LOW_BITS = ROUND_AND_BIAS + 512
"""Another constant with the same nine last bits, all that a shift by 23 leaves. Two kernels need the sum: were it the same sum in both,
mlx would make a third kernel for it, a pass over memory."""


def exp_is_scalar() -> bool:
    """Whether mlx's own `exp` computes one number at a time here."""
    return on_x86()


def exp_nonpositive(x: mx.array) -> mx.array:
    """e^x for float32 x ≤ 0, as exact as mlx's `exp`; results below the smallest normal float32 become 0, as does −inf. No
    gradient."""
    return _exp(x) if exp_is_scalar() else mx.exp(x)


def exp_clipped(x: mx.array) -> mx.array:
    """e^x for any float32 x, at most 2^127; results below the smallest normal float32 become 0. For use under
    `compiled_by_shape`."""
    return _exp2(mx.clip(x * LOG2_E, MIN_EXPONENT, -MIN_EXPONENT))


def _exp2(y: mx.array) -> mx.array:
    """2^y for −127 ≤ y < 128: the polynomial gives 2^r, and the bits of n + 127, shifted into the exponent field, are 2^n."""
    # The sum is a whole number below 2^24. Shifting by 23 moves its low byte, n + 127 ≤ 254, into the exponent field and pushes
    # everything above it out.
    power = mx.left_shift((y + SAME_LOW_BITS).astype(mx.int32), 23).view(mx.float32)
    # (y + ROUND_AND_BIAS) − ROUND_AND_BIAS is exactly n, so r = y − n lies in [−½, ½].
    r = y - ((y + ROUND_AND_BIAS) - ROUND_AND_BIAS)
    value: Any = EXP2_COEFFICIENTS[-1]
    for coefficient in reversed(EXP2_COEFFICIENTS[1:-1]):  # Horner, but for the last step
        value = value * r + coefficient
    # The last step, with both terms times 2^n: that changes their exponents only, so it adds no rounding error, and the kernel is one
    # operation less deep than with a product at the end. n = −127 gives the bits of 0.
    result = value * (r * power) + power
    return mx.contiguous(result)  # copies nothing, and ends the fusion


# Compiled, its elementwise operations are a few passes over memory (where a gradient is traced, mlx runs them one by one).
@compiled_by_shape
def _exp(x: mx.array) -> mx.array:
    # One bound suffices for x ≤ 0. It also turns −inf, a masked score, into 2^−127, whose bits are those of 0.
    return _exp2(mx.maximum(x * LOG2_E, MIN_EXPONENT))
