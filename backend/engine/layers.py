"""mlx-lm's layers, computed our way.

Gathers whose gradient is the same bits every time: the gradient of x[index] is a scatter-add, which Metal makes with
atomics in changing order. On a CPU they are mlx's own. LoRA and DoRA in 16 bits as the sampler computes them:
round(y + round(x A) B), with A, B and their gradients in float32. LoRA in float32 with two passes over [tokens, out]
fewer than mlx-lm's. On a CPU RMS norms, and rotary embeddings that compute their angles once a pass of learning.
Letters: S rows of the source, N rows taken, V vocabulary, H hidden.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear

from backend.engine.cpu import rms_norm
from backend.engine.device import on_gpu
from backend.engine.graph import evaluate_after, learns

BLOCK = 1024  # tokens whose sums are computed together, as an array [BLOCK, N]


def take_distinct(source: mx.array, index_N: mx.array) -> mx.array:
    """source[index_N] for indices that all differ: its gradient is written, not added."""
    return _gathered(source, index_N, lambda d_out: scatter_unique(source.shape, index_N, d_out))


def scatter_unique(shape: tuple[int, ...], index_N: mx.array, rows: mx.array) -> mx.array:
    """Zeros of this shape [S, …] with rows [N, …] at indices that all differ."""
    blank = mx.zeros(shape, rows.dtype)
    blank[index_N] = rows
    return blank


def gather_with_repeats(source: mx.array, index_N: mx.array) -> mx.array:
    """source[index_N] for any indices and few source rows: its gradient is a product with [S, N] zeros and ones."""

    def gradient(d_out: mx.array) -> mx.array:
        chosen_SN = (mx.arange(source.shape[0])[:, None] == index_N[None]).astype(d_out.dtype)
        return (chosen_SN @ d_out.reshape(len(index_N), -1)).reshape(source.shape)

    return _gathered(source, index_N, gradient)


def embed(weight_VH: mx.array, tokens: mx.array) -> mx.array:
    """weight_VH[tokens], [..., H], for large vocabularies."""

    def gradient(d_out: mx.array) -> mx.array:
        return _summed_by_token(weight_VH.shape, tokens.reshape(-1), d_out.reshape(-1, d_out.shape[-1]))

    return _gathered(weight_VH, tokens, gradient)


def _gathered(source: mx.array, index: mx.array, gradient: Callable[[mx.array], mx.array]) -> mx.array:
    if not on_gpu():
        return source[index]

    @mx.custom_function
    def take(source: mx.array) -> mx.array:
        return source[index]

    @take.vjp
    def take_vjp(_source: mx.array, d_out: mx.array, _output: mx.array) -> mx.array:
        return gradient(d_out)

    return take(source)  # pyright: ignore[reportReturnType]: mlx's stubs know no signature of it


def _summed_by_token(shape: tuple[int, ...], token_N: mx.array, rows_NH: mx.array) -> mx.array:
    sums: list[mx.array] = []
    firsts: list[mx.array] = []
    for start in range(0, len(token_N), BLOCK):
        block_n = evaluate_after(token_N[start : start + BLOCK], sums[-1:])  # one [BLOCK, N] at a time
        same_nN = block_n[:, None] == token_N[None]
        sums.append(same_nN.astype(rows_NH.dtype) @ rows_NH)
        firsts.append(mx.argmax(same_nN, axis=1))
    sum_NH, first_N = mx.concatenate(sums), mx.concatenate(firsts)
    total_VH = mx.zeros(shape, rows_NH.dtype)
    # All occurrences of a token write the sum of the first one, so it does not matter which of them is written last.
    total_VH[token_N] = sum_NH[first_N]
    return total_VH


def embedding_call(self: nn.Embedding, tokens: mx.array) -> mx.array:
    is_learning = self.training and "weight" not in self._no_grad
    return embed(self.weight, tokens) if is_learning else self.weight[tokens]


def lora_embedding_call(self: LoRAEmbedding, tokens: mx.array) -> mx.array:
    y = self.embedding(tokens)
    z = self.dropout(embed(self.lora_a, tokens) @ self.lora_b)
    return y + (self.scale * z).astype(y.dtype)


def gather_sort(x: mx.array, indices: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """mlx-lm's `_gather_sort`: expert inputs [N · M, 1, H] ordered by expert, for x [..., 1, 1, H] and `indices` [...,
    M]; also the experts in that order, and the order's inverse."""
    M = indices.shape[-1]
    flat = indices.flatten()
    order = mx.argsort(flat)
    # Repeated first, so that the order is a permutation: the gradient of a repetition is a plain sum.
    repeated = mx.repeat(x.flatten(0, -3), M, axis=0)
    return take_distinct(repeated, order), flat[order], mx.argsort(order)


def scatter_unsort(x: mx.array, inverse: mx.array, shape: Any = None) -> mx.array:
    x = take_distinct(x, inverse)
    return x if shape is None else mx.unflatten(x, 0, shape)


MLX_LM_LORA, MLX_LM_DORA = LoRALinear.__call__, DoRALinear.__call__
PLAIN_ROPE, PLAIN_NORM = nn.RoPE.__call__, nn.RMSNorm.__call__


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
    b = self.scale * self.lora_b
    if x.dtype == mx.float32:
        return mx.addmm(self.linear(x), self.dropout(x) @ self.lora_a, b)
    return add_adapter(self.linear(x), self.dropout(x), self.lora_a, b)


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


class Rotation(NamedTuple):
    """In place of a rotary embedding's offset: cosines of each token's own angles, and sines, those of a head's first
    half negative, [B or 1, 1, N, d]. d: the rotated size of a head."""

    cos: mx.array
    sin: mx.array


def turned_halves(rope: Callable[..., mx.array], size: int, N: int, offset: mx.array | int) -> mx.array:
    """[B, 2, N, size]: what the halves of a head x = (x₁, x₂) contribute after its rotation, x₁ ⊗ turned[:, 0] + x₂ ⊗
    turned[:, 1], at N positions from each of the B `offset` on."""
    B = len(offset) if isinstance(offset, mx.array) and offset.ndim else 1
    halves_21d = np.repeat(np.eye(2, dtype=np.float32), size // 2, axis=1)[:, None]
    return rope(mx.array(np.tile(halves_21d, (B, 1, N, 1))), offset=offset)


@lru_cache(maxsize=4)  # all layers of a pass have the same number or array as offset
def _rotation(size: int, base: float, scale: float, N: int, offset: mx.array | int) -> Rotation:
    plain = partial(mx.fast.rope, dims=size, traditional=False, base=base, scale=scale)
    turned, half = turned_halves(plain, size, N, offset), size // 2
    of_first, of_second = turned[:, :1], turned[:, 1:]
    cos = mx.concatenate([of_first[..., :half], of_second[..., half:]], axis=-1)
    return Rotation(cos, mx.concatenate([of_second[..., :half], of_first[..., half:]], axis=-1))


def rope(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
    """`nn.RoPE.__call__`, whose `offset` may be a `Rotation`. In learning on a CPU it computes the angles once a pass:
    mlx does so for each layer, and again for its gradient."""
    if not isinstance(offset, Rotation):
        if self.traditional or x.dtype != mx.float32 or not learns():
            return PLAIN_ROPE(self, x, offset)
        offset = _rotation(self.dims, self.base, self.scale, x.shape[-2], offset)
    cos, sin = offset

    def swapped(x: mx.array) -> mx.array:
        first, second = mx.split(x, 2, axis=-1)
        return mx.concatenate([second, first], axis=-1)

    @mx.custom_function
    def turn(x: mx.array) -> mx.array:
        return x * cos + swapped(x) * sin

    @turn.vjp
    def turn_back(_primals: Any, d_out: mx.array, _output: mx.array) -> mx.array:
        return d_out * cos - swapped(d_out) * sin

    wide, rest = x[..., : cos.shape[-1]].astype(mx.float32), x[..., cos.shape[-1] :]  # some rotate a part of a head
    turned: Any = turn(wide)
    return mx.concatenate([turned.astype(x.dtype), rest], axis=-1) if rest.size else turned.astype(x.dtype)


def norm_call(self: Any, x: mx.array) -> mx.array:
    """`nn.RMSNorm.__call__`."""
    is_plain = on_gpu() or learns() or x.dtype != mx.float32
    return PLAIN_NORM(self, x) if is_plain else rms_norm(x, self.weight, self.eps)


# (mlx's or mlx-lm's class, our `__call__`)
METHODS = ((LoRALinear, lora_linear), (DoRALinear, dora_linear), (nn.RoPE, rope), (nn.RMSNorm, norm_call))
