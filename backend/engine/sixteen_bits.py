"""LoRA, DoRA and silu(gate) · up in 16 bits, computed alike by the learner and the sampler.

mlx-lm's adapters are float32 and so are their products: y + round(scale · (x A) B). The sampler keeps the adapters of
several layers side by side and computes round(y + round(x A) B) in the model's type, with two kernels instead of five
(`backend.sampling.fused_linear`). The difference, in every layer of every token, was half of the distance between
sampler and learner in bfloat16. So the learner computes the sampler's expression: A and B stay float32 and are rounded
for the product alone, and their gradients are computed in float32.

mlx-lm's silu(gate) · up rounds after each of its operations; here it is computed in float32 and rounded once, as in a
kernel that ends with it (`backend.engine.metal`). The backward pass recomputes the sigmoid instead of keeping float32
arrays of the size of the input.

`backend.engine.patches` puts these in place of mlx-lm's for inputs of 16 bits.
"""

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
    """y + (x A) B, [..., out], in the type of x and y (16 bits); A [in, rank] and B [rank, out] are float32, as are
    their gradients. x A is rounded, and the sum once."""
    return _add_product(y, x, a, b)  # pyright: ignore[reportReturnType]


def lora_linear(self: Any, x: mx.array) -> mx.array:
    """`LoRALinear.__call__`: W x + scale · (dropout(x) A) B."""
    if x.dtype == mx.float32:
        return MLX_LM_LORA(self, x)
    return add_adapter(self.linear(x), self.dropout(x), self.lora_a, self.scale * self.lora_b)


def dora_linear(self: Any, x: mx.array) -> mx.array:
    """`DoRALinear.__call__` (arXiv:2402.09353, equation 5): m / ‖W + scale · A B‖ times what LoRA gives, plus the bias.
    The norm is a constant for the gradient (section 4.3)."""
    if x.dtype == mx.float32:
        return MLX_LM_DORA(self, x)
    weight = self._dequantized_weight()
    adapted = weight + (self.scale * self.lora_b.T) @ self.lora_a.T
    gain = (self.m / mx.stop_gradient(mx.linalg.norm(adapted, axis=1))).astype(x.dtype)
    y = gain * add_adapter(x @ weight.T, self.dropout(x), self.lora_a, self.scale * self.lora_b)
    return y + self.linear.bias if "bias" in self.linear else y


METHODS = ((LoRALinear, lora_linear), (DoRALinear, dora_linear))
"""(mlx-lm's class, our `__call__`)."""


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
