"""Attention as learning needs it: nothing of the size [tokens, tokens] outlives the block of queries it was made for.

mlx keeps, for its backward pass, the share that every token has in every other, of all layers at once. Here the forward pass
keeps one number for each query, and the backward pass works the shares out again, block after block (FlashAttention-2,
arXiv:2307.08691, algorithms 1 and 2). Rows of one prompt look at one copy of its keys and values. Knows arrays; no model.

Letters: B rows, P prompts, H heads, J heads of keys (each read by H / J heads of queries), N tokens, n of them a block, K prompt
tokens, d and e sizes of a head's keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import mlx.core as mx

from backend.engine.cpu.vector_exp import exp_below_zero, on_cpu
from backend.engine.evaluation_order import evaluate_after
from backend.spec.memory.chunking import attention_block


class PromptKV(NamedTuple):
    """What rows look at before their own tokens, as one tree of arrays: keys [P, J, K, d] and values [P, J, K, e]. Row b has
    prompt b // (B / P). `length_P` hides what is padding; None where nothing is."""

    keys: mx.array
    values: mx.array
    length_P: mx.array | None = None


def attend(
    queries_BHNd: mx.array,
    keys_BJNd: mx.array,
    values_BJNe: mx.array,
    scale: float,
    prompts: PromptKV | None = None,
    block: int | None = None,
) -> mx.array:
    """softmax(scale · q kᵀ) v over the prompt and all tokens up to the query's own: [B, H, N, e], in the values' type. Shares
    are worked out in float32. `block`: queries at a time (None: as many as fit the device's share of memory)."""
    B, H, N, _ = queries_BHNd.shape
    K = prompts.keys.shape[2] if prompts else 0
    size = block or attention_block(B * H, N, K + N, gpu=not on_cpu())
    spans = [slice(start, min(start + size, N)) for start in range(0, N, size)]
    length_P = prompts.length_P if prompts else None

    def sides(span: slice, seen: Sequence[mx.array]) -> list[_Side]:
        keys, values, *prompt = seen
        own = _Side(keys[:, :, : span.stop], values[:, :, : span.stop], first=span.start)
        return [own, *([_Side(prompt[0], prompt[1], length_P=length_P)] if prompt else [])]

    @mx.custom_function
    def look(queries: mx.array, *seen: mx.array) -> tuple[mx.array, ...]:
        made: list[tuple[mx.array, mx.array]] = []
        for span in spans:
            q = evaluate_after(queries[:, :, span], made[-1] if made else ())
            made.append(_merged([side.look(q) for side in sides(span, seen)]))
        out, log_total = (_along_queries(column) for column in zip(*made, strict=True))
        return out.astype(seen[1].dtype), log_total

    @look.vjp
    def look_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        queries, *seen = primals
        slope, (out, log_total) = cotangents[0], outputs
        # What a share's slope loses since all shares are divided by their sum: [B, H, N, 1].
        lost = (slope.astype(mx.float32) * out.astype(mx.float32)).sum(axis=-1, keepdims=True)
        slopes: list[mx.array] = []
        total: list[mx.array] = []
        for span in reversed(spans):
            q = evaluate_after(queries[:, :, span], slopes[-1:] + total)
            pulled = [
                side.pull_back(q, *(x[:, :, span] for x in (slope, log_total, lost))) for side in sides(span, seen)
            ]
            of_queries, *others = zip(*pulled, strict=True)
            slopes.append(reduce(add, of_queries))
            total = _added(total, [x for pair in zip(*others, strict=True) for x in pair])
        return (_along_queries(slopes[::-1]), *total)

    return look(queries_BHNd * scale, keys_BJNd, values_BJNe, *(prompts[:2] if prompts else ()))[0]  # pyright: ignore[reportIndexIssue]


def look_back(
    queries_BH1d: mx.array, keys_BJCd: mx.array, values_BJCe: mx.array, scale: float, seen_B11C: mx.array
) -> mx.array:
    """One token of each row looks at those columns of a cache that `seen_B11C` allows: [B, H, 1, e], without a gradient."""
    (B, H, _, d), J = queries_BH1d.shape, keys_BJCd.shape[1]
    scores = (queries_BH1d * scale).reshape(B, J, H // J, d) @ keys_BJCd.swapaxes(-1, -2)
    scores = scores.astype(mx.float32) + mx.where(seen_B11C, 0.0, -mx.inf)
    weights = exp_below_zero(scores - scores.max(axis=-1, keepdims=True))
    out = (weights.astype(values_BJCe.dtype) @ values_BJCe).astype(mx.float32) / weights.sum(axis=-1, keepdims=True)
    return out.astype(values_BJCe.dtype).reshape(B, H, 1, -1)


class _Looked(NamedTuple):
    """What a block of queries has seen on one side: Σ weight · value [B, H, n, e], the sum of the weights, and the peak of their
    logarithms, below which they are: [B, H, n, 1]."""

    out: mx.array
    total: mx.array
    peak: mx.array


@dataclass(frozen=True, slots=True)
class _Side:
    """Keys and values, [S, J, M, …], each looked at by B / S rows. Queries of all heads and rows that look at the same keys are
    laid one below the other: one product for all of them."""

    keys: mx.array
    values: mx.array
    first: int | None = None
    """Place of the block's first query among the keys: a query does not look at what comes after it. None: it looks at all."""
    length_P: mx.array | None = None

    def look(self, q_BHnd: mx.array) -> _Looked:
        scores = self._scores(self._laid(q_BHnd), q_BHnd.shape[2])
        peak = scores.max(axis=-1, keepdims=True)
        weights = exp_below_zero(scores - peak)
        seen = (weights.astype(self.values.dtype) @ self.values).astype(mx.float32)
        return _Looked(*(self._stood(x, q_BHnd.shape) for x in (seen, weights.sum(axis=-1, keepdims=True), peak)))

    def pull_back(
        self, q_BHnd: mx.array, slope: mx.array, log_total: mx.array, lost: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Slopes in the queries, the keys and the values."""
        q, slope, log_total, lost = (self._laid(x) for x in (q_BHnd, slope, log_total, lost))
        shares = exp_below_zero(self._scores(q, q_BHnd.shape[2]) - log_total)
        values = shares.astype(self.values.dtype).swapaxes(-1, -2) @ slope
        of_scores = (shares * ((slope @ self.values.swapaxes(-1, -2)) - lost)).astype(self.keys.dtype)
        return self._stood(of_scores @ self.keys, q_BHnd.shape), of_scores.swapaxes(-1, -2) @ q, values

    def _scores(self, q: mx.array, n: int) -> mx.array:
        """In float32; −∞ where a query does not look."""
        scores = (q @ self.keys.swapaxes(-1, -2)).astype(mx.float32)
        columns = mx.arange(self.keys.shape[2])
        if self.first is not None and n > 1:
            place = self.first + mx.arange(q.shape[2]) % n
            scores = scores + mx.where(place[:, None] >= columns, 0.0, -mx.inf)
        if self.length_P is not None:
            scores = scores + mx.where(columns < self.length_P[:, None], 0.0, -mx.inf)[:, None, None]
        return scores

    def _laid(self, x_BHnd: mx.array) -> mx.array:
        """[B, H, n, d] → [S, J, (rows · heads · n), d]."""
        (B, H, n, d), (S, J) = x_BHnd.shape, self.keys.shape[:2]
        return x_BHnd.reshape(S, B // S, J, H // J, n, d).swapaxes(1, 2).reshape(S, J, -1, d)

    def _stood(self, x: mx.array, shape: Sequence[int]) -> mx.array:
        """The way back."""
        (B, H, n, _), (S, J) = shape, self.keys.shape[:2]
        return x.reshape(S, J, B // S, H // J, n, -1).swapaxes(1, 2).reshape(B, H, n, -1)


def _merged(sides: Sequence[_Looked]) -> tuple[mx.array, mx.array]:
    """What was seen on all sides, divided by the sum of all weights; and the logarithm of that sum."""
    peak = sides[0].peak
    for side in sides[1:]:
        peak = mx.maximum(peak, side.peak)
    parts = [(mx.exp(side.peak - peak), side) for side in sides]
    total = sum(below * side.total for below, side in parts)
    out = sum((below / total) * side.out for below, side in parts)
    return out, peak + mx.log(total)  # pyright: ignore


def _added(total: list[mx.array], found: list[mx.array]) -> list[mx.array]:
    """Slopes in keys and values, added up; an earlier block of queries has looked at the first of them only."""
    if not total:
        return found
    missing = ((0, 0), (0, 0))
    return [x + mx.pad(y, [*missing, (0, x.shape[2] - y.shape[2]), (0, 0)]) for x, y in zip(total, found, strict=True)]


def _along_queries(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=2)
