"""The gated unit, silu(gate) · up, for processors on which mlx takes one number at a time.

Its gradient needs the gate's sigmoid, which is kept, and no second exponential. It is the same function to float32's rounding.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from backend.engine.cpu.vector_exp import exp_of_any, in_one


@in_one
def _forward(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    gate_32 = gate.astype(mx.float32)
    open_ = 1 / (1 + exp_of_any(-gate_32))
    return (gate_32 * open_ * up.astype(mx.float32)).astype(up.dtype), open_


@mx.custom_function
def _swiglu(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    return _forward(gate, up)


@_swiglu.vjp
def _swiglu_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
    gate, up = (x.astype(mx.float32) for x in primals)
    slope, open_ = cotangents[0].astype(mx.float32), outputs[1]
    silu = gate * open_
    of_gate = slope * up * (open_ + silu - silu * open_)  # silu' = σ + g σ (1 − σ)
    return of_gate.astype(primals[0].dtype), (slope * silu).astype(primals[1].dtype)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) · up, of any shape they share, in the type of `up`."""
    return _swiglu(gate, up)[0]  # pyright: ignore[reportIndexIssue]
