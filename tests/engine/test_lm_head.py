"""The vocabulary head by itself: precision in 16 bits, and memory. Its values and gradients are in test_forward.py."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.lm_head import token_logps
from backend.engine.model_probe import split
from tests.support.forward_cases import model_of


def test_half_precision_logits_are_normalised_in_float32(tmp_path: Path) -> None:
    """In bfloat16 the softmax alone would be wrong by 0.02 a token."""
    split_model = split(model_of(tmp_path, dtype="bfloat16"))
    hidden_NH = split_model.hidden(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]]))[0]
    target_N = mx.array([1, 4, 1, 5, 9, 2, 6, 5])
    scores = token_logps(split_model.logits, split_model.head, hidden_NH, target_N, temperature=0.7)
    assert hidden_NH.dtype == mx.bfloat16 and scores.logp_N.dtype == scores.entropy_N.dtype == mx.float32
    logits_NV = np.array(split_model.logits(hidden_NH).astype(mx.float32), np.float64) / 0.7
    logp_NV = logits_NV - np.log(np.exp(logits_NV).sum(-1, keepdims=True))
    np.testing.assert_allclose(scores.logp_N, logp_NV[np.arange(8), np.array(target_N)], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logits_whose_exponentials_overflow_float32_are_scored(temperature: float) -> None:
    rng = np.random.default_rng(0)
    logits_NV, target = 200 * rng.normal(size=(6, 50)), np.arange(6)
    logits_NV[target, target] = logits_NV.max(axis=-1) - [0, 1, 2, 3, 300, 600]
    scaled_NV = logits_NV / temperature
    logp_NV = scaled_NV - np.logaddexp.reduce(scaled_NV, axis=-1, keepdims=True)
    entropy_N = -(np.exp(logp_NV) * logp_NV).sum(-1)
    hidden_NV = mx.array(logits_NV, mx.float32)
    for with_gradient in (True, False):
        scores = token_logps(
            lambda x: x, None, hidden_NV, mx.array(target), temperature=temperature, with_gradient=with_gradient
        )
        np.testing.assert_allclose(scores.logp_N, logp_NV[target, target], rtol=1e-5, atol=2e-4)
        np.testing.assert_allclose(scores.entropy_N, entropy_N, atol=2e-4)
