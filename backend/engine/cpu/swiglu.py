"""silu(gate) · up for x86, where mlx's `sigmoid` computes one exponential at a time.

The exponential is `exp_clipped`, in vectors. The backward pass needs only σ(gate), which the forward pass keeps, so there is no
second exponential. Equal to mlx-lm's up to float32 rounding. On other devices mlx-lm's own is used (backend.engine.patches).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.compiled import compiled_by_shape
from backend.engine.cpu.vector_exp import exp_clipped


@compiled_by_shape
def _forward(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    gate_32 = gate.astype(mx.float32)
    sigmoid = 1 / (1 + exp_clipped(-gate_32))
    return (gate_32 * sigmoid * up.astype(mx.float32)).astype(up.dtype), sigmoid


@mx.custom_function
def _swiglu(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    return _forward(gate, up)


@_swiglu.vjp
def _swiglu_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
    gate, up = (x.astype(mx.float32) for x in primals)
    d_out, sigmoid = cotangents[0].astype(mx.float32), outputs[1]
    silu = gate * sigmoid
    # σ is an output of the custom function only to be kept for this pass; nothing else reads it.
    d_gate = d_out * up * (sigmoid + silu - silu * sigmoid)  # silu' = σ + g σ (1 − σ)
    return d_gate.astype(primals[0].dtype), (d_out * silu).astype(primals[1].dtype)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up, elementwise, of any shape they share, in the type of `up`."""
    return _swiglu(gate, up)[0]  # pyright: ignore[reportIndexIssue]
