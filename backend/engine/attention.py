"""Exact attention in blocks of queries, whose backward pass recomputes the softmax (FlashAttention-2,
arXiv:2307.08691).

Kept from the forward pass are the output and one log-sum-exp per query, L [B, H, N, 1]. Per block of n queries, P =
exp(S − L):

    S = scale · Q Kᵀ      O = P V      D = rowsum(dO ∘ O)
    dV = Pᵀ dO            dS = P ∘ (dO Vᵀ − D)            dQ = dS K            dK = dSᵀ Q

All in float32, as Metal's fused attention, which samples; output and gradients are rounded once. One softmax spans up
to two segments of keys: the rows' own (causal, padded on the right) and their prompt's.

Letters: B rows, P prompts, H query heads, J key heads, N tokens, n of them a block, K prompt tokens, d and e sizes of a
head's keys and values.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import mlx.core as mx

from backend.engine.chunk_sizes import attention_block
from backend.engine.cpu import exp_nonpositive, row_sums
from backend.engine.device import on_gpu
from backend.engine.graph import evaluate_after

MIN_SCORES = 1 << 12  # scores of a decoding step from which exponentials in vectors pay on x86


class PromptKV(NamedTuple):
    """A layer's keys [P, J, K, d] and values [P, J, K, e] of the prompts; row b attends to prompt b // (B / P).
    `length_P` masks padding on the right (None: there is none)."""

    keys: mx.array
    values: mx.array
    length_P: mx.array | None = None


def blocked_attention(
    queries_BHNd: mx.array,
    keys_BJNd: mx.array,
    values_BJNe: mx.array,
    scale: float,
    prompts: PromptKV | None = None,
    block: int | None = None,
) -> mx.array:
    """softmax(scale · q kᵀ) v over the row's prompt and its own tokens up to the query: [B, H, N, e], in the values'
    type. Differentiable. `block`: queries at a time (None: as `attention_block` allows)."""
    (B, H, N, _), J = queries_BHNd.shape, keys_BJNd.shape[1]
    P, _, K, _ = prompts.keys.shape if prompts else (1, J, 0, 0)
    size = block or attention_block(B * H, N, K + N, gpu=on_gpu())
    spans = [slice(start, min(start + size, N)) for start in range(0, N, size)]
    length_P = prompts.length_P if prompts else None

    def by_key_head(x_BHNd: mx.array, span: slice) -> mx.array:
        # No gather: the rows of a prompt are consecutive, and so are the query heads of a key head (head h reads key
        # head h // (H / J), as in mlx). [P, J, B / P, H / J · n, d]
        x = x_BHNd[:, :, span]
        x = x.reshape(P, B // P, J, -1, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(P, J, B // P, -1, x.shape[-1])

    def by_row(x: mx.array, heads: int) -> mx.array:
        """Of [P, J, B / P, heads · n, d] the inverse: [B, J · heads, n, d]."""
        return x.reshape(P, J, B // P, heads, -1, x.shape[-1]).swapaxes(1, 2).reshape(B, J * heads, -1, x.shape[-1])

    def segments(arrays: Sequence[mx.array], span: slice) -> list[mx.array]:
        """Keys or values that the span attends to: own ones [P, J, B / P, ·, d] and the prompts' [P, J, K, d]."""
        # Keys after the block's last query are all masked: they are left out instead of computed.
        own, *prompt = arrays
        return [x.astype(mx.float32) for x in (by_key_head(own, slice(span.stop)), *prompt)]

    def of_prompt(x: mx.array) -> mx.array:
        # Queries that share keys become rows of one matrix, so nothing is repeated.
        return x.reshape(P, J, -1, x.shape[-1])

    def product(a: mx.array, b: mx.array) -> mx.array:
        return a @ b if b.ndim == 5 else (of_prompt(a) @ b).reshape(*a.shape[:-1], b.shape[-1])

    def scores(q: mx.array, keys: Sequence[mx.array], span: slice, causal: mx.array) -> list[mx.array]:
        own, *prompt = (product(q, x.swapaxes(-1, -2)) for x in keys)
        n = span.stop - span.start
        if n > 1:  # a single query is the last of its keys, so nothing is to be masked
            by_head = own.reshape(P, J, -1, n, span.stop)
            own = (by_head + causal[:n, N - span.start : N + n]).reshape(own.shape)
        if length_P is not None:
            allowed = mx.where(mx.arange(K) < length_P[:, None], 0.0, -mx.inf)
            prompt = [x + allowed[:, None, None, None] for x in prompt]
        return [own, *prompt]

    @mx.custom_function
    def attention(queries: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
        causal, blocks = _causal(size, N), []
        for span in spans:
            # mlx is lazy: without an order between blocks, it would allocate the scores of several of them at once.
            q = by_key_head(evaluate_after(queries, blocks[-1] if blocks else ()), span)
            parts = scores(q, segments(arrays[::2], span), span, causal)
            # The peak keeps exp ≤ 1. It is finite (−∞ − −∞ would be NaN), for a query sees itself.
            peak = reduce(mx.maximum, [x.max(axis=-1, keepdims=True) for x in parts])
            weights = [exp_nonpositive(x - peak) for x in parts]
            total = reduce(add, map(row_sums, weights))
            out = reduce(add, map(product, weights, segments(arrays[1::2], span))) / total
            blocks.append((by_row(out, H // J), by_row(peak + mx.log(total), H // J)))
        out, logsumexp = (mx.concatenate(list(column), axis=2) for column in zip(*blocks, strict=True))
        # L stays float32: the backward pass exponentiates S − L, where bfloat16 would be wrong by several per cent.
        return out.astype(arrays[1].dtype), logsumexp

    @attention.vjp
    def attention_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        queries, *arrays = primals
        # cotangents[1] belongs to L, which no caller sees.
        d_out, (out, logsumexp) = cotangents[0].astype(mx.float32), outputs
        # D = rowsum(dO ∘ O) = rowsum(P ∘ dP) [B, H, N, 1]: the part of dS that comes from the softmax's denominator.
        # From O it needs no keys, so it is known before the first block.
        delta = row_sums(d_out * out.astype(mx.float32))
        causal = _causal(size, N)
        d_queries: list[mx.array] = []
        d_arrays: list[mx.array] = []
        # From the last block to the first, because the last attends to all keys: the running sum of dK and dV has full
        # size from the start, and earlier, shorter blocks are padded to it.
        for span in reversed(spans):
            ordered = evaluate_after(queries, d_queries[-1:] + d_arrays)
            q, d_o, lse, d = (by_key_head(x, span) for x in (ordered, d_out, logsumexp, delta))
            keys, values = segments(arrays[::2], span), segments(arrays[1::2], span)
            # S ≤ L, as L is the logarithm of a sum that S is in: P is normalised, and its exponent is never positive.
            weights = [exp_nonpositive(x - lse) for x in scores(q, keys, span, causal)]
            # dP and D nearly cancel where P is close to one-hot: in 16 bits little of the difference would be left.
            d_scores = [w * (product(d_o, v.swapaxes(-1, -2)) - d) for w, v in zip(weights, values, strict=True)]
            d_queries.append(by_row(reduce(add, map(product, d_scores, keys)), H // J))
            padding = [(0, 0), (0, 0), (0, N - span.stop), (0, 0)]
            of_block = [
                mx.pad(by_row(x[0].swapaxes(-1, -2) @ y, 1), padding) for x, y in ((d_scores, q), (weights, d_o))
            ]
            of_block += [
                of_prompt(a).swapaxes(-1, -2) @ of_prompt(b)
                for ds, w in zip(d_scores[1:], weights[1:], strict=True)
                for a, b in ((ds, q), (w, d_o))
            ]
            d_arrays = [x + y for x, y in zip(d_arrays, of_block, strict=True)] if d_arrays else of_block
        return (
            mx.concatenate(d_queries[::-1], axis=2),
            *(d.astype(x.dtype) for d, x in zip(d_arrays, arrays, strict=True)),
        )

    # Scaled outside the custom function: d numbers a query instead of K + N scores, and autodiff scales and rounds dQ.
    scaled = queries_BHNd.astype(mx.float32) * scale
    own = prompts[:2] if prompts else ()
    return attention(scaled, keys_BJNd, values_BJNe, *own)[0]  # pyright: ignore[reportIndexIssue]


def cached_attention(
    queries_BHNd: mx.array, keys_BJCd: mx.array, values_BJCe: mx.array, scale: float, mask: Any = None
) -> mx.array:
    """softmax(scale · q kᵀ) v of N queries a row and C cached columns: [B, H, N, e], no gradient. For x86, where mlx's
    exponentials are scalar. `mask`: "causal", the columns allowed [..., N or 1, C], or numbers to add."""
    (B, H, N, d), (J, C) = queries_BHNd.shape, keys_BJCd.shape[1:3]
    is_causal = isinstance(mask, str)
    if (size := attention_block(B * H, N, C, gpu=False)) < N:
        blocks: list[mx.array] = []
        for start in range(0, N, size):
            end = min(start + size, N)
            columns = C - N + end if is_causal else C
            own_mask = mask[..., start:end, :] if isinstance(mask, mx.array) and mask.shape[-2] > 1 else mask
            q = evaluate_after(queries_BHNd[:, :, start:end], blocks[-1:])
            blocks.append(cached_attention(q, keys_BJCd[:, :, :columns], values_BJCe[:, :, :columns], scale, own_mask))
        return mx.concatenate(blocks, axis=2)
    queries, keys, values = (x.astype(mx.float32) for x in (queries_BHNd, keys_BJCd, values_BJCe))
    # The H / J query heads of a key head become rows of one product, so no key is repeated.
    scores = (queries * scale).reshape(B, J, H // J * N, d) @ keys.swapaxes(-1, -2)
    if is_causal:
        mask = mx.arange(C - N, C)[:, None] >= mx.arange(C)
    if mask is not None:
        # Not −∞: a query in a prompt's padding has no column, and −∞ − −∞ would be NaN.
        added = mx.where(mask, 0.0, mx.finfo(mx.float32).min) if mask.dtype == mx.bool_ else mask
        by_row = added.ndim == 4 and added.shape[1:3] == (1, 1)  # one mask for all queries of a row
        scores = scores + added if by_row else (scores.reshape(B, H, N, C) + added).reshape(scores.shape)
    if scores.size < MIN_SCORES:
        out = mx.softmax(scores, axis=-1) @ values
    else:
        weights = exp_nonpositive(scores - scores.max(axis=-1, keepdims=True))
        # Normalised after the product: e numbers a query to divide instead of C.
        out = (weights @ values) / row_sums(weights)
    return out.astype(values_BJCe.dtype).reshape(B, H, N, -1)


def _causal(n: int, N: int) -> mx.array:
    """[n, N + n]: 0 where a block's query i sees key j, its first being key N, else −∞. Block masks are its slices."""
    return mx.where(mx.arange(n)[:, None] >= mx.arange(-N, n), 0.0, -mx.inf)
