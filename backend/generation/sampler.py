"""From logits to a token: temperature, top-k, top-p, min-p, one draw; and the token's log-probability under the policy.

The randomness comes in from outside, one uniform number a token, so that a row's draws depend on nothing but the row.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache, reduce
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from backend.engine.cpu.vector_exp import exp_nonpositive, on_cpu

FEW = 64
"""Candidates that are sorted at once; more of them are halved first, where that is cheaper than sorting."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. temperature 0 takes the likeliest; top_p 1, top_k 0 and min_p 0 filter nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


GREEDY = Sampling(temperature=0.0)


class Drawn(NamedTuple):
    """What was drawn in each row: the token, its log-probability under the policy in nats, and the log of the share of
    the policy's mass that the filters left. logp − log_kept is what the token was really drawn with."""

    token_B: mx.array
    logp_B: mx.array
    log_kept_B: mx.array


def draw(logits_BV: mx.array, uniform_B: mx.array, sampling: Sampling) -> Drawn:
    """One token a row, by inverse CDF.

    The log-probability is that of the policy at `temperature`, before any filter; greedy reports temperature 1.
    Filters apply after the temperature: top-k, then top-p over what is left, then min-p.
    """
    temperature = sampling.temperature or 1.0
    peak_B1 = _tempered(logits_BV.max(axis=-1, keepdims=True), temperature)
    # One exp pass serves the softmax, the filters and the draw. The peak's mass is 1.
    mass_BV = exp_nonpositive(_tempered(logits_BV, temperature) - peak_B1)
    if sampling.temperature == 0:
        logp_B = -mx.log(mass_BV.sum(axis=-1))
        return Drawn(mx.argmax(logits_BV, axis=-1), logp_B, mx.zeros_like(logp_B))
    floor_B1 = _floor(mass_BV, sampling)
    kept_BV = mass_BV if floor_B1 is None else mx.where(mass_BV < floor_B1, 0, mass_BV)
    token_B, left_B = _inverse_cdf(kept_BV, uniform_B)
    total_B = left_B if floor_B1 is None else mass_BV.sum(axis=-1)
    logp_B = _tempered(_at(logits_BV, token_B), temperature) - peak_B1[:, 0] - mx.log(total_B)
    return Drawn(token_B, logp_B, mx.zeros_like(logp_B) if floor_B1 is None else mx.log(left_B / total_B))


def _tempered(logits: mx.array, temperature: float) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits if temperature == 1 else logits * (1 / temperature)


def _at(values_BV: mx.array, token_B: mx.array) -> mx.array:
    return mx.take_along_axis(values_BV, token_B[:, None], axis=-1)[:, 0]


# ── the draw ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _inverse_cdf(kept_BV: mx.array, uniform_B: mx.array) -> tuple[mx.array, mx.array]:
    """The token at which the running sum of what is kept reaches `uniform` of it, and the whole of it, both [B].

    The block of tokens is found by the blocks' sums, then the token inside it: the vocabulary is read once.
    """
    B, V = kept_BV.shape
    blocks_BNW = kept_BV.reshape(B, -1, _width(V))
    sum_BN = blocks_BNW.sum(axis=-1)
    left_B = sum_BN.sum(axis=-1)
    block_B, target_B = _reach(sum_BN, uniform_B * left_B)
    inside_BW = mx.take_along_axis(blocks_BNW, block_B[:, None, None], axis=1)[:, 0]
    place_B, _ = _reach(inside_BW, target_B)
    return block_B * _width(V) + place_B, left_B


def _reach(mass_BN: mx.array, target_B: mx.array) -> tuple[mx.array, mx.array]:
    """Where the running sum of the masses first reaches the target, and how much of the target lies inside that place.

    Only places with mass count: a GPU sums in blocks, and its edges waver by a rounding where there is none. Should the
    target by such a rounding lie above every edge, the highest edge is nearest to it.
    """
    edge_BN = mx.cumsum(mass_BN, axis=-1)
    short_BN = mx.where(mass_BN > 0, mx.minimum(edge_BN - target_B[:, None], 0), -mx.inf)
    place_B = mx.argmax(short_BN, axis=-1)
    return place_B, target_B - (_at(edge_BN, place_B) - _at(mass_BN, place_B))


@cache
def _width(V: int) -> int:
    """Tokens in a block: the divisor of V next below its root, so that no padding is needed. 1 for a prime: one block each."""
    return next(width for width in range(math.isqrt(V), 0, -1) if V % width == 0)


# ── filters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _floor(mass_BV: mx.array, sampling: Sampling) -> mx.array | None:
    """[B, 1]: the least mass that the filters keep. Ties at a threshold are kept. None: nothing is filtered."""
    floors_B1, candidates_BK = [], mass_BV
    if 0 < sampling.top_k < mass_BV.shape[-1]:
        candidates_BK = mx.topk(mass_BV, sampling.top_k, axis=-1)
        floors_B1.append(candidates_BK.min(axis=-1, keepdims=True))
    if sampling.top_p < 1:
        floors_B1.append(_nucleus_floor(candidates_BK, sampling.top_p))
    if sampling.min_p > 0:
        floors_B1.append(mx.full((mass_BV.shape[0], 1), sampling.min_p))
    return reduce(mx.maximum, floors_B1) if floors_B1 else None


def _nucleus_floor(mass_BK: mx.array, top_p: float) -> mx.array:
    """The smallest mass inside the smallest set of likeliest tokens that makes up `top_p` (Holtzman et al. 2020)."""
    need_B1 = top_p * mass_BK.sum(axis=-1, keepdims=True)
    if on_cpu():  # a GPU's partition is a sort
        mass_BK, need_B1 = _halved(mass_BK, need_B1)
    falling_BK = -mx.sort(-mass_BK, axis=-1)
    inside_BK = mx.cumsum(falling_BK, axis=-1) - falling_BK < need_B1
    return mx.where(inside_BK, falling_BK, mx.inf).min(axis=-1, keepdims=True)


def _halved(mass_BK: mx.array, need_B1: mx.array) -> tuple[mx.array, mx.array]:
    """The few masses among which the running sum from the top reaches `need`, and what is left of it there.

    The upper half either makes up the need, or all of it counts and the rest lies in the lower half: halves of halves
    take two partitions' time in all, a third of a sort's.
    """
    while (K := mass_BK.shape[-1]) > FEW:
        if K % 2:
            mass_BK = mx.pad(mass_BK, [(0, 0), (0, 1)])
        lower_BK, upper_BK = mx.split(mx.partition(mass_BK, mass_BK.shape[-1] // 2, axis=-1), 2, axis=-1)
        sum_B1 = upper_BK.sum(axis=-1, keepdims=True)
        enough_B1 = sum_B1 >= need_B1
        mass_BK = mx.where(enough_B1, upper_BK, lower_BK)
        need_B1 = mx.where(enough_B1, need_B1, need_B1 - sum_B1)
    return mass_BK, need_B1


def uniforms(seed: int, draws: list[tuple[int, ...]], count: int) -> np.ndarray:
    """[len(draws), count] float32 in [0, 1): row i depends on `seed` and draws[i] only.

    A completion's draws therefore do not change with the batch it stands in, its place there, the device or the
    number of ranks, and a resumed run draws what the unbroken one would have drawn.
    """
    rows = [np.random.Generator(np.random.Philox(key=_key(seed, draw))).random(count, np.float32) for draw in draws]
    return np.stack(rows)


def _key(seed: int, draw: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr((seed, draw)).encode(), digest_size=16).digest(), "little")
