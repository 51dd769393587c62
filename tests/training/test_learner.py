"""The learner's state and randomness, and the loss that the guide of MLX LoRA Studio documents."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map, tree_unflatten

from backend.config.config import Config, parse, read
from backend.models.policy import load_policy
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.training.grpo import loss_settings
from backend.training.losses import policy_loss
from backend.training.not_finite import NotFiniteError
from backend.utils.places import resources
from tests.support.reference_forward import LONGEST, G, P, sampled_groups
from tests.support.small_settings import PLAIN_SGD, SMALL_LORA, UNFILTERED

SETTINGS = SMALL_LORA | UNFILTERED | {"batch_size": P, "group_size": G, "max_completion_length": LONGEST, "beta": 0.05}


def config_of(model: Path, **settings: Any) -> Config:
    return parse({"model": str(model)} | SETTINGS | settings)


def test_weights_and_moments_are_whole_but_while_an_update_is_made(model: Path, monkeypatch: pytest.MonkeyPatch):
    """A non-finite number is found before anything is touched; what fails half-way leaves nothing that may be saved."""
    config = config_of(model, **PLAIN_SGD | {"max_grad_norm": 1.0})
    policy = load_policy(config)
    learner = build_learner(policy, config, 1)
    ones, first = tree_map(mx.ones_like, policy.parameters()), min(policy.trainable())
    unit = tree_unflatten(
        [(name, mx.zeros_like(x).at[0, 0].add(float(name == first))) for name, x in policy.trainable().items()]
    )
    infinite = tree_map(lambda x: x * math.inf, ones)
    for gradient, loss, told in ((infinite, 0.5, "gradient: a norm of inf"), (unit, math.nan, "loss: nan")):
        with pytest.raises(NotFiniteError, match=told) as caught:
            learner._apply(gradient, mx.array(loss))
        assert caught.value.update == 1 and learner.updates == 0 and learner.is_whole
    metrics = [learner._apply(gradient, mx.array(0.5)) for gradient in (unit, ones)]
    assert [each["grad_clipped"] for each in metrics] == [0, 1] and metrics[0]["grad_norm"] == 1
    assert learner.updates == 2 and learner.is_whole
    monkeypatch.setattr(type(policy), "set_parameters", lambda self, parameters: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learner._apply(unit, mx.array(0.5))
    assert learner.updates == 2 and not learner.is_whole


def test_dropout_depends_on_the_seed_and_the_update_alone(model: Path) -> None:
    """Not on mlx's global random state: a resumed run must sample the same dropout masks as the uninterrupted one."""
    config = config_of(model, dropout=0.3)
    groups = sampled_groups(load_policy(config).model)

    def first_step(seed: int = 0, updates: int = 0) -> dict[str, np.ndarray]:
        policy = load_policy(config)
        learner = build_learner(policy, config.model_copy(update={"seed": seed}), 1)
        learner.updates = updates
        mx.random.seed(np.random.default_rng().integers(1 << 30).item())
        learner.learn(pack(groups, pad_id=0))
        return {name: np.array(x) for name, x in policy.trainable().items()}

    plain = first_step()
    assert all(np.array_equal(x, plain[name]) for name, x in first_step().items())
    for changed in (first_step(seed=1), first_step(updates=1)):
        assert any(not np.array_equal(x, plain[name]) for name, x in changed.items())


def test_old_log_probabilities_are_computed_without_dropout(model: Path) -> None:
    """The old policy is the sampler's, and sampling drops nothing; an update before left the model in training mode."""
    config = config_of(model, beta=0, dropout=0.5, sampling_correction="token_truncate")
    policy = load_policy(config)
    policy.assign({name: x + 0.1 for name, x in policy.trainable().items()})  # B = 0 would hide what is dropped before
    policy.model.train()
    learner = build_learner(policy, config, 1)
    batch = pack(sampled_groups(policy.model), pad_id=0)
    (micro_batch,) = learner.algorithm.optimizer_batch(batch, learner.forward)
    policy.model.eval()
    (logp_BT,) = learner.forward.logps_without_gradient(policy.split_model, [micro_batch])
    assert np.array_equal(np.array(micro_batch.batch.old_logp_BT), np.array(logp_BT))


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
