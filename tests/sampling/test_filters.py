"""Top-k, top-p and min-p without a sort sample the token that a sort samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.device import on_gpu
from backend.sampling.sampler import Sampling, sample_tokens
from backend.utils.machine import TREAT_CPU_AS
from tests.support.reference_sampler import sample_by_sort

SAMPLINGS = [
    Sampling(top_k=20, top_p=0.95),
    Sampling(0.7, top_k=1),
    Sampling(1.3, top_k=20, top_p=0.8, min_p=0.02),
    Sampling(top_p=0.95),
    Sampling(1.5, top_p=0.999, min_p=0.001),
    Sampling(top_p=1e-6),
    Sampling(top_p=1 - 1e-6),
    Sampling(0.9, min_p=0.05),
    Sampling(top_k=3000, top_p=0.9),
]
"""Usual ones, extremes of p, and a k above some vocabularies and without blocks in others."""

ROW_KINDS = 10


def rows_of_every_kind(V: int, seed: int) -> np.ndarray:
    """[10, V] float32 logits: peaked, flat, rounded to few values, equal, masked, dominated by one token."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 1, (ROW_KINDS, V)) * np.array([[0.05], [1], [3], [8], [2], [2], [0], [2], [2], [1]])
    rows[4] = np.round(rows[4] * 4) / 4  # ties everywhere, at every threshold
    rows[5] = np.round(rows[5])
    rows[7, rng.random(V) < 0.9] = -np.inf
    rows[8, : V // 2] = rows[8, 0]  # a tie of half the row, in one run of ids
    rows[9, rng.integers(V)] = 1e4
    rows[7, rng.integers(V)] = 3.0  # so that no row is all −inf
    return rows.astype(np.float32)


@cache
def draw(sampling: Sampling, as_gpu: bool) -> Callable[[mx.array, mx.array], mx.array]:
    """Compiled, as in a rollout; a trace for the choices of either device."""
    return mx.compile(lambda logits_BV, uniform_B: sample_tokens(logits_BV, uniform_B, sampling).token_B)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("choices", ["cpu", "gpu"])
@pytest.mark.parametrize("V", [1, 2, 150, 2049, 2304, 4099, pytest.param(20_000, marks=pytest.mark.proof)])
def test_filters_against_a_sort(V: int, choices: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of every kind of row, by either device's kernels, on the CPU, whose sums are exact."""
    if choices == "gpu" and V > 5000:
        pytest.skip("its sums in float32 may give another token")
    monkeypatch.setenv(TREAT_CPU_AS, choices)
    with mx.stream(mx.cpu):
        for dtype in (mx.float32, mx.bfloat16):
            logits_BV = mx.array(rows_of_every_kind(V, seed=V)).astype(dtype)
            uniform_BU = np.random.default_rng(V).random((ROW_KINDS, 6), np.float32)
            ours = draw(sampling, on_gpu())(mx.repeat(logits_BV, 6, axis=0), mx.array(uniform_BU).flatten())
            by_sort = sample_by_sort(logits_BV, uniform_BU, sampling)
            np.testing.assert_array_equal(np.array(ours), by_sort, err_msg=f"V {V}, {sampling}, {dtype}")
