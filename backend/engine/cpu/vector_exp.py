"""Powers of e, as softmax, sampling and gated units need them: what they spend their time on.

mlx works `exp` out in vectors on Apple hardware and on GPUs, but one number at a time on an x86 CPU, 13 ns each. There the
same steps are spelled out in operations that do run in vectors. Nothing else is worth spelling out here.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import mlx.core as mx

LOG2_E = 1 / math.log(2)

POWER = (1.0, 0.6931469776, 0.2402224209, 0.0555073374, 0.0096715126, 0.0013264727)
"""2^r as a polynomial in r, 1 at 0: on [−½, ½] it is never further off than 1e-7 of itself (Remez)."""

LOWEST = -127.0
"""The exponent whose bits are all zero: the number 0."""

ROUNDER = 1.5 * 2.0**23 + 127
"""Added to a float32, it pushes the fraction out: what remains in the last bits is the nearest whole number, plus 127."""


def on_cpu() -> bool:
    """Whether mlx computes on the CPU in this process."""
    return mx.default_device() == mx.Device(mx.cpu, 0)


def on_x86() -> bool:
    """Whether that is an x86 processor."""
    return on_cpu() and platform.machine() in ("x86_64", "AMD64")


def spelled_out() -> bool:
    """Whether mlx's own `exp` takes one number at a time here."""
    return on_x86()


def in_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, compiled: its operations become a few passes over memory, but for where a gradient is traced.
    What was traced is kept for the shapes met last; `mx.compile` by itself would keep all that ever came."""

    @lru_cache(maxsize=64)
    def compiled(_shapes: tuple[Any, ...]) -> Callable[..., Any]:
        # Traces belong to a function, and go with it: each shape has one of its own.
        return mx.compile(lambda *arrays: function(*arrays))

    @wraps(function)
    def call(*arrays: mx.array) -> Any:
        return compiled(tuple((x.shape, x.dtype) for x in arrays))(*arrays)

    return call


def exp_below_zero(x: mx.array) -> mx.array:
    """e^x for float32 x ≤ 0, as exact as mlx's `exp`; 0 where it would be no normal number, so for −inf too. Carries no
    gradient."""
    return _exp(x) if spelled_out() else mx.exp(x)


def exp_of_any(x: mx.array) -> mx.array:
    """e^x, spelled out; no larger than 2^127, and 0 where it would be no normal number. To be used inside of `in_one`."""
    return _power(mx.clip(x * LOG2_E, LOWEST, -LOWEST))


def _power(y: mx.array) -> mx.array:
    """2^y = 2^n · 2^r with n whole, for −127 ≤ y < 128: the polynomial gives 2^r, the bits of n shifted into the exponent's
    place 2^n."""
    whole = y + ROUNDER
    r = y - (whole - ROUNDER)
    value: Any = POWER[-1]
    for term in reversed(POWER[:-1]):
        value = value * r + term
    return value * mx.left_shift(whole.view(mx.int32), 23).view(mx.float32)


@in_one
def _exp(x: mx.array) -> mx.array:
    return _power(mx.maximum(x * LOG2_E, LOWEST))
