"""e to the power of numbers that are not positive: what softmax and sampling spend their time on.

mlx works `exp` out in vectors on Apple hardware and on GPUs, but one number at a time on an x86 CPU, 15 ns each. There
the same steps are spelled out in operations that do run in vectors. Nothing else is worth spelling out here.
"""

from __future__ import annotations

import math
import platform

import mlx.core as mx

TAYLOR = [math.log(2) ** k / math.factorial(k) for k in range(7)]
"""2^r as a polynomial in r; on [−½, ½] its first missing term is below half a unit in float32's last place."""

ROUNDER = 1.5 * 2.0**23
"""Added to a float32, it pushes the fraction out: what remains in the last bits is the nearest whole number."""


def on_cpu() -> bool:
    """Whether mlx computes on the CPU in this process."""
    return mx.default_device() == mx.Device(mx.cpu, 0)


def spelled_out() -> bool:
    """Whether mlx's own `exp` takes one number at a time here."""
    return on_cpu() and platform.machine() in ("x86_64", "AMD64")


def exp_below_zero(x: mx.array) -> mx.array:
    """e^x for float32 x ≤ 0, as exact as mlx's `exp`; 0 where it would be no normal number, so for −inf too. Carries no
    gradient."""
    return _spelled(x) if spelled_out() else mx.exp(x)


def _spelled(x: mx.array) -> mx.array:
    """2^n · 2^r with n whole: the polynomial gives 2^r, the bits of n shifted into the exponent's place 2^n."""
    y = mx.maximum(x * (1 / math.log(2)), -127.0)  # an exponent of −127 is all zero bits: the number 0
    whole = y + ROUNDER
    r = y - (whole - ROUNDER)
    power = mx.left_shift(whole.view(mx.int32) + 127, 23).view(mx.float32)
    value = mx.full((), TAYLOR[-1])
    for term in reversed(TAYLOR[:-1]):
        value = value * r + term
    return value * power
