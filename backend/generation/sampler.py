"""From logits to tokens: temperature, top-k, top-p, min-p, one inverse-CDF sample a row, and its log-probability.

**Inverse CDF.** With masses m_v = exp((logit_v − max) / temperature), zero where filtered, and a uniform u in [0, 1), the sample is
the first token whose running sum of masses reaches u · Σ m. The caller passes a uniform number for each token, so a row's sample
depends on nothing but the row, whatever batch it is in (mlx's own categorical sampling depends on the batch).

**Exact top-p by bisection.** Filtering only needs the smallest mass inside the nucleus, not an order. Partition the masses at the
median: if the upper half already has `top_p` of the mass, the threshold lies in it; if not, all of it is inside and the search
continues in the lower half for the rest of `top_p`. n + n/2 + n/4 + … elements are partitioned, a third of the time of a sort.

**log_kept.** `logp_B` is the policy's log-probability before any filter, which training reproduces. Filters renormalise: the token
was really sampled with exp(logp − log_kept), where log_kept is the log of the share of the policy's mass that the filters kept
(0 without filters). Importance correction needs it (`backend.training.batch`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache, reduce
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from backend.engine.cpu.vector_exp import exp_nonpositive
from backend.engine.device import on_cpu

SORT_BELOW = 64
"""Candidates that are sorted at once; more of them are bisected first, where that is cheaper than sorting."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled. temperature 0 takes the likeliest; top_p 1, top_k 0 and min_p 0 filter nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def has_filters(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


GREEDY = Sampling(temperature=0.0)


class SampledTokens(NamedTuple):
    """One sampled token a row: its id, its log-probability under the policy in nats before any filter, and the log of the share
    of the policy's mass that the filters kept. The token was sampled with log-probability logp − log_kept."""

    token_B: mx.array
    logp_B: mx.array
    log_kept_B: mx.array


def sample_tokens(logits_BV: mx.array, uniform_B: mx.array, sampling: Sampling) -> SampledTokens:
    """One token a row, by inverse CDF.

    The log-probability is that of the policy at `temperature`, before any filter; greedy reports temperature 1.
    Filters apply after the temperature: top-k, then top-p over what is left, then min-p.
    """
    temperature = sampling.temperature or 1.0
    peak_B1 = _tempered(logits_BV.max(axis=-1, keepdims=True), temperature)
    # One exp pass serves the softmax, the filters and the sample. Less the maximum, every mass is at most 1, and the likeliest
    # token's is exactly 1 (so min-p needs no maximum). float32: 16 bits cannot sum 100,000 masses.
    mass_BV = exp_nonpositive(_tempered(logits_BV, temperature) - peak_B1)
    if sampling.temperature == 0:
        logp_B = -mx.log(mass_BV.sum(axis=-1))
        return SampledTokens(mx.argmax(logits_BV, axis=-1), logp_B, mx.zeros_like(logp_B))
    floor_B1 = _filter_floor(mass_BV, sampling)
    # A where, no renumbering: the running sum passes over zeros, so token ids stay indices into [V].
    kept_BV = mass_BV if floor_B1 is None else mx.where(mass_BV < floor_B1, 0, mass_BV)
    token_B, kept_sum_B = _inverse_cdf(kept_BV, uniform_B)
    # log π of the policy before any filter divides by the whole mass; without filters `_inverse_cdf` has summed it already.
    total_B = kept_sum_B if floor_B1 is None else mass_BV.sum(axis=-1)
    logp_B = _tempered(_at(logits_BV, token_B), temperature) - peak_B1[:, 0] - mx.log(total_B)
    return SampledTokens(token_B, logp_B, mx.zeros_like(logp_B) if floor_B1 is None else mx.log(kept_sum_B / total_B))


def _tempered(logits: mx.array, temperature: float) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits if temperature == 1 else logits * (1 / temperature)


def _at(values_BV: mx.array, token_B: mx.array) -> mx.array:
    return mx.take_along_axis(values_BV, token_B[:, None], axis=-1)[:, 0]


# ── inverse CDF ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inverse_cdf(kept_BV: mx.array, uniform_B: mx.array) -> tuple[mx.array, mx.array]:
    """The first token at which the running sum of the kept masses reaches `uniform` times their sum, and that sum, both [B].

    Two levels: the sums of blocks of about √V tokens select a block, then the running sum inside it the token. So the vocabulary
    is read once, and no running sum over all of V is made.
    """
    B, V = kept_BV.shape
    blocks_BNW = kept_BV.reshape(B, -1, _block_width(V))
    sum_BN = blocks_BNW.sum(axis=-1)
    kept_sum_B = sum_BN.sum(axis=-1)
    block_B, target_B = _first_reaching(sum_BN, uniform_B * kept_sum_B)
    inside_BW = mx.take_along_axis(blocks_BNW, block_B[:, None, None], axis=1)[:, 0]
    index_B, _ = _first_reaching(inside_BW, target_B)
    return block_B * _block_width(V) + index_B, kept_sum_B


def _first_reaching(mass_BN: mx.array, target_B: mx.array) -> tuple[mx.array, mx.array]:
    """The first index at which the running sum of the masses reaches the target, and the rest of the target at that index.

    Only indices with mass count: a GPU sums in blocks, so its running sum may fall by a rounding where the mass is 0, and counting
    the edges below the target would select a filtered token. If by such a rounding the target lies above every edge, the highest
    edge is the nearest to it.
    """
    edge_BN = mx.cumsum(mass_BN, axis=-1)
    # Every edge at or beyond the target is 0, the others are negative; argmax takes the first of equal maxima.
    short_BN = mx.where(mass_BN > 0, mx.minimum(edge_BN - target_B[:, None], 0), -mx.inf)
    index_B = mx.argmax(short_BN, axis=-1)
    return index_B, target_B - (_at(edge_BN, index_B) - _at(mass_BN, index_B))


@cache
def _block_width(V: int) -> int:
    """Tokens in a block: the largest divisor of V up to √V, so that no padding is needed. 1 for a prime: a block for each token."""
    return next(width for width in range(math.isqrt(V), 0, -1) if V % width == 0)


# ── filters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _filter_floor(mass_BV: mx.array, sampling: Sampling) -> mx.array | None:
    """[B, 1]: the least mass that the filters keep. Ties at a threshold are kept. None: nothing is filtered."""
    floors_B1, candidates_BK = [], mass_BV
    if 0 < sampling.top_k < mass_BV.shape[-1]:
        # Top-p then applies to these K alone: to the distribution that top-k leaves, renormalised.
        candidates_BK = mx.topk(mass_BV, sampling.top_k, axis=-1)
        floors_B1.append(candidates_BK.min(axis=-1, keepdims=True))
    if sampling.top_p < 1:
        floors_B1.append(_nucleus_floor(candidates_BK, sampling.top_p))
    # min-p keeps p(v) ≥ min_p · max p (arXiv:2407.01082); in masses max is 1, and normalisation cancels.
    if sampling.min_p > 0:
        floors_B1.append(mx.full((mass_BV.shape[0], 1), sampling.min_p))
    return reduce(mx.maximum, floors_B1) if floors_B1 else None


def _nucleus_floor(mass_BK: mx.array, top_p: float) -> mx.array:
    """[B, 1]: the smallest mass inside the nucleus, the smallest set of likeliest tokens that makes up `top_p` of the mass
    (Holtzman et al. 2020, arXiv:1904.09751)."""
    need_B1 = top_p * mass_BK.sum(axis=-1, keepdims=True)
    if on_cpu():  # a GPU's partition is a sort
        mass_BK, need_B1 = _bisected(mass_BK, need_B1)
    falling_BK = -mx.sort(-mass_BK, axis=-1)
    # The mass *before* a token decides, so the token that crosses the threshold is kept, and never none.
    inside_BK = mx.cumsum(falling_BK, axis=-1) - falling_BK < need_B1
    return mx.where(inside_BK, falling_BK, mx.inf).min(axis=-1, keepdims=True)


def _bisected(mass_BK: mx.array, need_B1: mx.array) -> tuple[mx.array, mx.array]:
    """At most 64 masses among which the running sum from the top reaches `need`, and `need` less the masses above them.

    Each round partitions at the median: either the upper half's sum reaches `need`, or all of it is inside and the search
    continues in the lower half. All rounds take the time of two partitions, a third of a sort's.
    """
    while (K := mass_BK.shape[-1]) > SORT_BELOW:
        if K % 2:
            mass_BK = mx.pad(mass_BK, [(0, 0), (0, 1)])  # a mass of 0 changes no sum, and lets halves be equal
        lower_BK, upper_BK = mx.split(mx.partition(mass_BK, mass_BK.shape[-1] // 2, axis=-1), 2, axis=-1)
        sum_B1 = upper_BK.sum(axis=-1, keepdims=True)
        enough_B1 = sum_B1 >= need_B1
        # Rows take different halves, of one size, so the batch stays one array.
        mass_BK = mx.where(enough_B1, upper_BK, lower_BK)
        need_B1 = mx.where(enough_B1, need_B1, need_B1 - sum_B1)
    return mass_BK, need_B1


# ── randomness ───────────────────────────────────────────────────────────────────────────────────────────────────────


def keyed_uniforms(seed: int, keys: list[tuple[int, ...]], count: int) -> np.ndarray:
    """[len(keys), count] float32 in [0, 1): row i depends on `seed` and keys[i] only, from a counter-based generator (Philox).

    So a completion's random numbers do not change with the batch, its row, the device or the number of ranks, and a resumed
    run samples what the uninterrupted one would have sampled.
    """
    rows = [np.random.Generator(np.random.Philox(key=_hash(seed, key))).random(count, np.float32) for key in keys]
    return np.stack(rows)


def _hash(seed: int, key: tuple[int, ...]) -> int:
    # Not Python's hash(), which has 64 bits and may differ between versions; Philox takes a key of 128.
    return int.from_bytes(hashlib.blake2b(repr((seed, key)).encode(), digest_size=16).digest(), "little")
