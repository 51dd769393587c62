"""From logits to a token: temperature, top-k, top-p, min-p, one draw; and the token's log-probability under the policy.

The randomness comes in from outside, one uniform number a token, so that a row's draws depend on nothing but the row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np


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
    scaled = logits_BV.astype(mx.float32)
    if sampling.temperature == 0:
        token_B = mx.argmax(scaled, axis=-1)
        logp_B = _at(scaled, token_B) - mx.logsumexp(scaled, axis=-1)
        return Drawn(token_B, logp_B, mx.zeros_like(logp_B))
    if sampling.temperature != 1:
        scaled = scaled * (1 / sampling.temperature)
    peak_B1 = scaled.max(axis=-1, keepdims=True)
    mass_BV = mx.exp(scaled - peak_B1)  # one pass serves the softmax, the filters and the draw; the peak's mass is 1
    total_B = mass_BV.sum(axis=-1)
    kept_BV = _kept(mass_BV, sampling)
    edge_BV = mx.cumsum(kept_BV, axis=-1)
    # A GPU sums in blocks, and its edges waver by a rounding where nothing was kept: only tokens with mass may be drawn.
    # Staying clear of the last edge leaves one of them above the target whatever the uniform rounds to.
    edge_BV = mx.where(kept_BV > 0, edge_BV, -1.0)
    last_B1 = edge_BV.max(axis=-1, keepdims=True)
    target_B1 = (uniform_B[:, None] * (1 - 1e-6)) * last_B1
    token_B = mx.argmax(edge_BV > target_B1, axis=-1)
    logp_B = _at(scaled, token_B) - peak_B1[:, 0] - mx.log(total_B)
    log_kept_B = mx.log(last_B1[:, 0] / total_B) if sampling.filters else mx.zeros_like(logp_B)
    return Drawn(token_B, logp_B, log_kept_B)


def _at(values_BV: mx.array, token_B: mx.array) -> mx.array:
    return mx.take_along_axis(values_BV, token_B[:, None], axis=-1)[:, 0]


def _kept(mass_BV: mx.array, sampling: Sampling) -> mx.array:
    """The mass with everything that the filters drop set to 0. Ties at a threshold are kept."""
    V = mass_BV.shape[-1]
    if 0 < sampling.top_k < V:
        best_BK = mx.topk(mass_BV, sampling.top_k, axis=-1)
        mass_BV = mx.where(mass_BV < best_BK.min(axis=-1, keepdims=True), 0, mass_BV)
    else:
        best_BK = mass_BV
    if sampling.top_p < 1:
        mass_BV = mx.where(mass_BV < _nucleus_floor(best_BK, sampling.top_p), 0, mass_BV)
    if sampling.min_p > 0:
        mass_BV = mx.where(mass_BV < sampling.min_p, 0, mass_BV)
    return mass_BV


def _nucleus_floor(candidates_BK: mx.array, top_p: float) -> mx.array:
    """The smallest mass inside the smallest set of likeliest tokens that makes up `top_p` (Holtzman et al. 2020)."""
    falling = -mx.sort(-candidates_BK, axis=-1)
    before = mx.cumsum(falling, axis=-1) - falling
    inside = before < top_p * falling.sum(axis=-1, keepdims=True)
    return mx.where(inside, falling, mx.inf).min(axis=-1, keepdims=True)


def uniforms(seed: int, draws: list[tuple[int, ...]], count: int) -> np.ndarray:
    """[len(draws), count] float32 in [0, 1): row i depends on `seed` and draws[i] only.

    A completion's draws therefore do not change with the batch it stands in, its place there, the device or the
    number of ranks, and a resumed run draws what the unbroken one would have drawn.
    """
    rows = [np.random.Generator(np.random.Philox(key=_key(seed, draw))).random(count, np.float32) for draw in draws]
    return np.stack(rows)


def _key(seed: int, draw: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr((seed, draw)).encode(), digest_size=16).digest(), "little")
