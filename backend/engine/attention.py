"""Exact attention in blocks of queries, whose backward pass recomputes the softmax (FlashAttention-2,
arXiv:2307.08691).

Kept from the forward pass are the output and one log-sum-exp per query, L [B, H, N, 1]. Per block of n queries, P =
exp(S − L):

    S = scale · Q Kᵀ      O = P V      D = rowsum(dO ∘ O)
    dV = Pᵀ dO            dS = P ∘ (dO Vᵀ − D)            dQ = dS K            dK = dSᵀ Q

All in float32, as Metal's fused attention, which samples; output and gradients are rounded once. Keys come in up to two
segments, a prompt's and the rows' own (causal, padded on the right), whose partial softmaxes merge exactly
(arXiv:1805.02867).

Letters: B rows, P prompts, H query heads, J key heads, N tokens, n of them a block, K prompt tokens, d and e sizes of a
head's keys and values. In a segment: S sets of keys (B or P), M keys in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    B, H, N, _ = queries_BHNd.shape
    K = prompts.keys.shape[2] if prompts else 0
    size = block or attention_block(B * H, N, K + N, gpu=on_gpu())
    spans = [slice(start, min(start + size, N)) for start in range(0, N, size)]
    length_P = prompts.length_P if prompts else None

    def segments(span: slice, arrays: Sequence[mx.array]) -> list[_Segment]:
        keys, values, *prompt = arrays
        # Keys after the block's last query are all masked: they are left out instead of computed.
        own = _Segment(keys[:, :, : span.stop], values[:, :, : span.stop], first_query=span.start)
        return [own, *([_Segment(prompt[0], prompt[1], length_P=length_P)] if prompt else [])]

    @mx.custom_function
    def attention(queries: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
        blocks: list[tuple[mx.array, mx.array]] = []
        for span in spans:
            # mlx is lazy: without an order between blocks, it would allocate the scores of several of them at once.
            q = evaluate_after(queries[:, :, span], blocks[-1] if blocks else ())
            blocks.append(_merge([segment.attend(q) for segment in segments(span, arrays)]))
        out, logsumexp = (_concatenate_queries(column) for column in zip(*blocks, strict=True))
        # L stays float32: the backward pass exponentiates S − L, where bfloat16 would be wrong by several per cent.
        return out.astype(arrays[1].dtype), logsumexp

    @attention.vjp
    def attention_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        queries, *arrays = primals
        # cotangents[1] belongs to L, which no caller sees.
        d_out, (out, logsumexp) = cotangents[0], outputs
        # D = rowsum(dO ∘ O) = rowsum(P ∘ dP) [B, H, N, 1]: the part of dS that comes from the softmax's denominator.
        # From O it needs no keys, so it is known before the first block.
        delta = (d_out.astype(mx.float32) * out.astype(mx.float32)).sum(axis=-1, keepdims=True)
        d_queries: list[mx.array] = []
        d_arrays: list[mx.array] = []
        # From the last block to the first, because the last attends to all keys: the running sum of dK and dV has full
        # size from the start, and earlier, shorter blocks are padded to it.
        for span in reversed(spans):
            q = evaluate_after(queries[:, :, span], d_queries[-1:] + d_arrays)
            d_out_32 = d_out[:, :, span].astype(mx.float32)
            grads = [
                segment.vjp(q, d_out_32, *(x[:, :, span] for x in (logsumexp, delta)))
                for segment in segments(span, arrays)
            ]
            dq, *dkv = zip(*grads, strict=True)
            d_queries.append(reduce(add, dq))
            of_block = [x for pair in zip(*dkv, strict=True) for x in pair]
            if d_arrays:  # an earlier block attends to the first keys only
                more = [x.shape[2] - y.shape[2] for x, y in zip(d_arrays, of_block, strict=True)]
                of_block = [mx.pad(y, [(0, 0), (0, 0), (0, n), (0, 0)]) for y, n in zip(of_block, more, strict=True)]
                of_block = [x + y for x, y in zip(d_arrays, of_block, strict=True)]
            d_arrays = of_block
        return (
            _concatenate_queries(d_queries[::-1]),
            *(d.astype(x.dtype) for d, x in zip(d_arrays, arrays, strict=True)),
        )

    # Scaled outside of the custom function: d numbers a query instead of K + N scores, and autodiff scales and rounds
    # dQ.
    scaled = queries_BHNd.astype(mx.float32) * scale
    own = prompts[:2] if prompts else ()
    return attention(scaled, keys_BJNd, values_BJNe, *own)[0]  # pyright: ignore[reportIndexIssue]


def decode_attention(
    queries_BHNd: mx.array, keys_BJCd: mx.array, values_BJCe: mx.array, scale: float, mask_B1NC: mx.array
) -> mx.array:
    """Attention of few queries per row to the cache columns that `mask_B1NC` allows: [B, H, N, e], no gradient. For a
    CPU: on x86 mlx's exponentials are scalar."""
    dtype = values_BJCe.dtype
    queries_BHNd, keys_BJCd, values_BJCe = (x.astype(mx.float32) for x in (queries_BHNd, keys_BJCd, values_BJCe))
    (B, H, N, d), J = queries_BHNd.shape, keys_BJCd.shape[1]
    # The H / J query heads of a key head become rows of one product, so no key is repeated.
    scores = (queries_BHNd * scale).reshape(B, J, H // J * N, d) @ keys_BJCd.swapaxes(-1, -2)
    allowed = mx.where(mask_B1NC, 0.0, -mx.inf)
    scores = scores + (allowed if N == 1 else mx.tile(allowed, (1, 1, H // J, 1)))
    if scores.size < MIN_SCORES:
        out = mx.softmax(scores, axis=-1) @ values_BJCe
    else:
        weights = exp_nonpositive(scores - scores.max(axis=-1, keepdims=True))
        # Normalised after the product: e numbers a query to divide instead of C.
        out = (weights @ values_BJCe) / weights.sum(axis=-1, keepdims=True)
    return out.astype(dtype).reshape(B, H, N, -1)


class _PartialSoftmax(NamedTuple):
    """Σ exp(S − peak) · v [B, H, n, e], Σ exp(S − peak) and the maximum score `peak`, both [B, H, n, 1]; float32."""

    out: mx.array
    total: mx.array
    peak: mx.array


@dataclass(frozen=True, slots=True)
class _Segment:
    """Keys [S, J, M, d] and values [S, J, M, e], each set attended to by B / S rows. Queries that share keys become
    rows of one matrix [S, J, B/S · H/J · n, d], so nothing is repeated."""

    keys: mx.array
    values: mx.array
    first_query: int | None = None  # the block's first query among the keys, for the causal mask; None: no mask
    length_P: mx.array | None = None  # keys of each set without padding; None: all

    def attend(self, q_BHnd: mx.array) -> _PartialSoftmax:
        scores = self._scores(self._grouped(q_BHnd), q_BHnd.shape[2])
        # The peak keeps exp ≤ 1. It is finite (−∞ − −∞ would be NaN): a query sees itself, and a prompt has a token.
        peak = scores.max(axis=-1, keepdims=True)
        weights = exp_nonpositive(scores - peak)
        out = weights @ self.values.astype(mx.float32)
        return _PartialSoftmax(*(self._ungrouped(x, q_BHnd.shape) for x in (out, row_sums(weights), peak)))

    def vjp(
        self, q_BHnd: mx.array, d_out: mx.array, logsumexp: mx.array, delta: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        q, d_out, logsumexp, delta = (self._grouped(x) for x in (q_BHnd, d_out, logsumexp, delta))
        keys, values = self.keys.astype(mx.float32), self.values.astype(mx.float32)
        # S ≤ L, for L is the logarithm of a sum that S is in: P comes out normalised, and its exponent is never
        # positive.
        weights = exp_nonpositive(self._scores(q, q_BHnd.shape[2]) - logsumexp)
        d_values = weights.swapaxes(-1, -2) @ d_out
        # dP and D nearly cancel where P is close to one-hot: in 16 bits little of the difference would be left.
        d_scores = weights * ((d_out @ values.swapaxes(-1, -2)) - delta)
        return self._ungrouped(d_scores @ keys, q_BHnd.shape), d_scores.swapaxes(-1, -2) @ q, d_values

    def _scores(self, q: mx.array, n: int) -> mx.array:
        scores = q @ self.keys.astype(mx.float32).swapaxes(-1, -2)
        columns = mx.arange(self.keys.shape[2])
        # A single query is the last key of its segment, so nothing is to be masked.
        if self.first_query is not None and n > 1:
            index = self.first_query + mx.arange(q.shape[2]) % n
            scores = scores + mx.where(index[:, None] >= columns, 0.0, -mx.inf)
        if self.length_P is not None:
            scores = scores + mx.where(columns < self.length_P[:, None], 0.0, -mx.inf)[:, None, None]
        return scores

    def _grouped(self, x_BHnd: mx.array) -> mx.array:
        # No gather: the rows of a prompt are consecutive, and so are the query heads of a key head (head h reads key
        # head h // (H / J), as in mlx).
        (B, H, n, d), (S, J) = x_BHnd.shape, self.keys.shape[:2]
        return x_BHnd.reshape(S, B // S, J, H // J, n, d).swapaxes(1, 2).reshape(S, J, -1, d)

    def _ungrouped(self, x: mx.array, shape: Sequence[int]) -> mx.array:
        (B, H, n, _), (S, J) = shape, self.keys.shape[:2]
        return x.reshape(S, J, B // S, H // J, n, -1).swapaxes(1, 2).reshape(B, H, n, -1)


def _merge(partials: Sequence[_PartialSoftmax]) -> tuple[mx.array, mx.array]:
    peak = partials[0].peak
    for partial in partials[1:]:
        peak = mx.maximum(peak, partial.peak)
    # Factors exp(peak_i − max peak) ≤ 1 never overflow. mx.exp: [B, H, n, 1] is too small for the vector version to
    # matter.
    rescaled = [(mx.exp(partial.peak - peak), partial) for partial in partials]
    total = sum(factor * partial.total for factor, partial in rescaled)
    out = sum((factor / total) * partial.out for factor, partial in rescaled)
    return out, peak + mx.log(total)  # pyright: ignore


def _concatenate_queries(blocks: Sequence[mx.array]) -> mx.array:
    return blocks[0] if len(blocks) == 1 else mx.concatenate(list(blocks), axis=2)
