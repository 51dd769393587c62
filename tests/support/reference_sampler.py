"""Top-k, top-p and min-p by a plain sort in float64: what the sampler's filters must agree with, token by token."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from backend.sampling import sampler
from backend.sampling.sampler import Sampling


def kept_by_sort(logits_BV: np.ndarray, mass_BV: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[B, V] bool: the tokens that the filters keep."""
    order_BV = np.argsort(-logits_BV, axis=1, kind="stable")
    falling_BV = np.take_along_axis(mass_BV.astype(np.float64), order_BV, axis=1)
    rank_V = np.arange(logits_BV.shape[1])
    inside_BV = np.broadcast_to(rank_V < (sampling.top_k or len(rank_V)), falling_BV.shape)
    if sampling.top_p < 1:
        running_BV = np.cumsum(np.where(inside_BV, falling_BV, 0), axis=1)
        before_BV = np.concatenate([np.zeros((len(running_BV), 1)), running_BV[:, :-1]], axis=1)
        inside_BV = inside_BV & (before_BV < sampling.top_p * running_BV[:, -1:])
    last_B1 = inside_BV.sum(axis=1, keepdims=True) - 1
    # Ties at the threshold are kept: of logits where top-k compares logits, of masses where top-p alone compares
    # masses.
    compared_BV = logits_BV if sampling.top_k else mass_BV
    floor_B1 = np.take_along_axis(np.take_along_axis(compared_BV, order_BV, axis=1), last_B1, axis=1)
    return (compared_BV >= floor_B1) & (mass_BV >= np.float32(sampling.min_p))


def sample_by_sort(logits_BV: mx.array, uniform_BU: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[B · U] tokens: U samples of each row by the sampler's masses and inverse CDF, filtered by a sort."""
    mass_BV = sampler._mass(logits_BV, logits_BV.max(axis=-1, keepdims=True), sampling.temperature)
    kept_BV = kept_by_sort(np.array(logits_BV.astype(mx.float32)), np.array(mass_BV), sampling)
    filtered_BV = mx.where(mx.array(kept_BV), mass_BV, 0)
    repeated_BV = mx.repeat(filtered_BV, uniform_BU.shape[1], axis=0)
    return np.array(sampler._inverse_cdf(repeated_BV, mx.array(uniform_BU).reshape(-1, 1))[0])[:, 0]
