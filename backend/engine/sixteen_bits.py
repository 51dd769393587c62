"""LoRA, DoRA and silu(gate) · up in 16 bits, computed alike by learner and sampler: round(y + round(x A) B), with A and
B kept in float32 and their gradients in float32. With mlx-lm's float32 products the two differed by twice as much.
silu(gate) · up is computed in float32 and rounded once; its backward pass recomputes the sigmoid."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

MLX_LM_LORA, MLX_LM_DORA = LoRALinear.__call__, DoRALinear.__call__


@mx.custom_function
def _add_product(y: mx.array, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
    return mx.addmm(y, x @ a.astype(x.dtype), b.astype(x.dtype))


@_add_product.vjp
def _add_product_vjp(primals: Any, d_out: Any, _output: Any) -> tuple[mx.array, ...]:
    _, x, a, b = primals
    # A sum over thousands of tokens can overflow float16 (65,504), and bfloat16 keeps three digits of it.
    x_N, d_out_N = (z.reshape(-1, z.shape[-1]).astype(mx.float32) for z in (x, d_out))
    # At the rounded A and B: this is the gradient of what was computed.
    a, b = (z.astype(x.dtype).astype(mx.float32) for z in (a, b))
    d_inner = d_out_N @ b.T
    d_x = (d_inner @ a.T).astype(x.dtype).reshape(x.shape)
    return d_out, d_x, x_N.T @ d_inner, (x_N @ a).T @ d_out_N


def add_adapter(y: mx.array, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
    """y + (x A) B, [..., out], in 16 bits; A [in, rank], B [rank, out] and their gradients are float32."""
    return _add_product(y, x, a, b)  # pyright: ignore[reportReturnType]


def lora_linear(self: Any, x: mx.array) -> mx.array:
    """`LoRALinear.__call__`: W x + scale · (dropout(x) A) B."""
    if x.dtype == mx.float32:
        return MLX_LM_LORA(self, x)
    return add_adapter(self.linear(x), self.dropout(x), self.lora_a, self.scale * self.lora_b)


def dora_linear(self: Any, x: mx.array) -> mx.array:
    """`DoRALinear.__call__` (arXiv:2402.09353, equation 5): m / ‖W + scale · A B‖ times LoRA's result, plus the bias.
    The norm is constant for the gradient."""
    if x.dtype == mx.float32:
        return MLX_LM_DORA(self, x)
    weight = self._dequantized_weight()
    adapted = weight + (self.scale * self.lora_b.T) @ self.lora_a.T
    gain = (self.m / mx.stop_gradient(mx.linalg.norm(adapted, axis=1))).astype(x.dtype)
    y = gain * add_adapter(x @ weight.T, self.dropout(x), self.lora_a, self.scale * self.lora_b)
    return y + self.linear.bias if "bias" in self.linear else y


METHODS = ((LoRALinear, lora_linear), (DoRALinear, dora_linear))  # (mlx-lm's class, our `__call__`)


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
