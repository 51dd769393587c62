"""The preset *As documented*: numbers worked from the formulas of MLX LoRA Studio's guide, in numpy, value and
gradient.

    ratio = π_θ/π_ref
    L = mean over valid tokens of −min(ratio·A, clip(ratio, 1−ε, 1+ε)·A) + β·(ratio·(π_ref/π_θ) − log(π_ref/π_θ) − 1)

Every part is differentiated in θ. test_learner.py holds the weights of whole updates with this preset against another
implementation.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import Config, parse, read
from backend.training.grpo import loss_settings
from backend.training.losses import policy_loss
from backend.utils.places import resources

B, T = 4, 6


def documented(**changes: Any) -> Config:
    preset = read(resources() / "presets" / "as_documented.yaml")
    return parse({"model": "m", "data": "d"} | preset | changes)


def loss_of(config: Config, logps: Any, ref: Any, scores: Any, mask: Any) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient in the log-probabilities, and metrics, as the learner computes them: against the reference."""
    arrays = [mx.array(np.asarray(x, np.float32)) for x in (logps, ref, scores, mask)]

    def loss(logp_BT: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        assert config.ratio_against == "reference"
        return policy_loss(logp_BT, arrays[1], arrays[1], arrays[2], arrays[3], **asdict(loss_settings(config)))

    (value, metrics), gradient = mx.value_and_grad(loss)(arrays[0])
    return float(value), np.array(gradient), {name: float(x) for name, x in metrics.items()}


def by_the_formulas(config: Config, logps: np.ndarray, ref: np.ndarray, scores: np.ndarray, mask: np.ndarray) -> float:
    """The document's loss in float64, token by token."""
    total = 0.0
    for i, t in np.argwhere(mask > 0):
        row = mask[i] > 0
        difference = logps[i] - ref[i]
        is_sequence = config.importance_sampling_level == "sequence"
        ratio = math.exp(difference[row].mean() if is_sequence else difference[t])
        low, high = 1 - config.epsilon, 1 + config.epsilon
        clip = -min(ratio * scores[i], min(max(ratio, low), high) * scores[i])
        share = math.exp(ref[i, t]) / math.exp(logps[i, t])
        total += clip + config.beta * (ratio * share - math.log(share) - 1)
    return total / mask.sum()


def gradient_by_the_formulas(config: Config, logps: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Central differences of the formula in every log-probability: every part counts, nothing is held constant."""
    gradient, h = np.zeros_like(logps), 1e-6
    for place in np.ndindex(logps.shape):
        up, down = logps.copy(), logps.copy()
        up[place] += h
        down[place] -= h
        gradient[place] = (by_the_formulas(config, up, *others) - by_the_formulas(config, down, *others)) / (2 * h)
    return gradient


def test_one_token_worked_by_hand() -> None:
    """π_θ 0.5, π_ref 0.4, A = 1: the ratio 1.25 is clipped at 1.0001; the KL is 1.25 · 0.8 − log 0.8 − 1 = −log 0.8 =
    0.22314."""
    loss, gradient, metrics = loss_of(documented(), [[math.log(0.5)]], [[math.log(0.4)]], [1.0], [[1]])
    assert loss == pytest.approx(-1.0001 + 0.1 * 0.2231436, abs=1e-6)
    assert gradient[0, 0] == pytest.approx(0.1, abs=1e-6), "the clipped part has none; of the KL's, d log π_θ is left"
    assert metrics["kl"] == pytest.approx(0.2231436, abs=1e-6) and metrics["clip_ratio_total"] == 1
    # π_θ 0.3, A = −1: the ratio 0.75 lies below the clip, so the pessimistic part is the clipped one: 0.9999. KL = log
    # 0.75.
    loss, gradient, _ = loss_of(documented(), [[math.log(0.3)]], [[math.log(0.4)]], [-1.0], [[1]])
    assert loss == pytest.approx(0.9999 + 0.1 * math.log(0.75), abs=1e-6)
    assert gradient[0, 0] == pytest.approx(0.1, abs=1e-6)
    # π_θ 0.3, A = 1: −0.75, not clipped, with the gradient −ratio · A.
    loss, gradient, _ = loss_of(documented(), [[math.log(0.3)]], [[math.log(0.4)]], [1.0], [[1]])
    assert loss == pytest.approx(-0.75 + 0.1 * math.log(0.75), abs=1e-6)
    assert gradient[0, 0] == pytest.approx(-0.75 + 0.1, abs=1e-6)


@pytest.mark.parametrize("settings", [{}, {"importance_sampling_level": "sequence"}, {"epsilon": 0.2, "beta": 0.7}])
def test_value_and_gradient_are_those_of_the_formulas(settings: dict[str, Any]) -> None:
    config, rng = documented(**settings), np.random.default_rng(3)
    ref = -rng.uniform(0.2, 3.0, (B, T))
    logps = ref + rng.normal(0, 0.3, (B, T))
    scores = np.array([1.2, -0.4, 0.9, -1.7])
    mask = (np.arange(T) < np.array([[6], [2], [4], [5]])).astype(float)
    loss, gradient, _ = loss_of(config, logps, ref, scores, mask)
    assert loss == pytest.approx(by_the_formulas(config, logps, ref, scores, mask), abs=2e-6)
    np.testing.assert_allclose(gradient, gradient_by_the_formulas(config, logps, ref, scores, mask), atol=2e-6)
    assert np.abs(gradient[mask > 0]).min() > 1e-6 and not gradient[mask == 0].any()


def test_at_beta_0_schulman_s_estimator_is_logged_and_moves_nothing() -> None:
    config = documented(beta=0)
    assert config.needs_reference and config.log_kl
    arguments = [[math.log(0.3)]], [[math.log(0.4)]], [1.0], [[1]]
    loss, gradient, metrics = loss_of(config, *arguments)
    assert loss == pytest.approx(-0.75, abs=1e-6) and gradient[0, 0] == pytest.approx(-0.75, abs=1e-6)
    share = 0.4 / 0.3
    assert metrics["kl"] == pytest.approx(share - math.log(share) - 1, abs=1e-6)
