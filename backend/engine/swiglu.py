"""silu(gate) · up in 16 bits, computed in float32 and rounded once, so that the learner and the sampler compute the same.

mlx-lm's rounds after each of its operations, and a kernel that has the gate as its last part (`backend.engine.metal.adapter`) has no
reason to. The backward pass recomputes the sigmoid, in one kernel, instead of keeping float32 arrays of the size of the input.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx


# shapeless: elementwise, so one trace serves all shapes.
@partial(mx.compile, shapeless=True)
def rounded_once(gate: mx.array, up: mx.array) -> mx.array:
    gate_32 = gate.astype(mx.float32)
    return (gate_32 * mx.sigmoid(gate_32) * up.astype(mx.float32)).astype(up.dtype)


@partial(mx.compile, shapeless=True)
def rounded_once_vjp(gate: mx.array, up: mx.array, d_out: mx.array) -> tuple[mx.array, mx.array]:
    gate_32, up_32, d_out_32 = (x.astype(mx.float32) for x in (gate, up, d_out))
    sigmoid = mx.sigmoid(gate_32)
    silu = gate_32 * sigmoid
    d_gate = d_out_32 * up_32 * (sigmoid + silu - silu * sigmoid)  # silu' = σ + g σ (1 − σ)
    return d_gate.astype(gate.dtype), (d_out_32 * silu).astype(up.dtype)


@mx.custom_function
def swiglu_16(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up, elementwise, of any shape they share, in the type of `up`."""
    return rounded_once(gate, up)


@swiglu_16.vjp
def _swiglu_16_vjp(primals: Any, d_out: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
    gate, up = primals
    return rounded_once_vjp(gate, up, d_out)
