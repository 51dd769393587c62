"""Given completions and rewards, the weights after a few steps equal those of an independent implementation of the
papers.

`Reference` shares no code with the backend: its own advantages, its own log-probabilities (one row at a time, the whole
vocabulary), its own loss, its own AdamW. Only the model's forward pass and automatic differentiation are mlx's.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map, tree_unflatten

from backend.config.config import Config, parse, read
from backend.models.policy import load_policy
from backend.training.advantages import advantages
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.training.grpo import loss_settings
from backend.training.losses import policy_loss
from backend.training.not_finite import NotFiniteError
from backend.types import Completion, Group, Problem
from backend.utils.places import resources
from tests.support.small_settings import SMALL_LORA, UNFILTERED

STEPS, P, G, LONGEST = 2, 3, 4, 9
"""Steps, problems a step, completions a problem, tokens of the longest completion."""
LOSS = {"beta": 0.05, "epsilon": 5e-3, "epsilon_high": 8e-3, "max_grad_norm": 1.0, "temperature": 0.8}
SIZES = {"batch_size": P, "group_size": G, "max_completion_length": LONGEST}
BASE = SMALL_LORA | UNFILTERED | LOSS | SIZES | {"learning_rate": 3e-3, "weight_decay": 0.1}
SGD = {"optimizer": "sgd", "learning_rate": 2e-2, "weight_decay": 0.0}
"""Where two ways to the same gradient are compared: AdamW divides by a gradient's size, so that of a weight whose
gradient is nearly 0 it would show rounding alone."""


def config_of(model: Path, **settings: Any) -> Config:
    """Losses that the form does not offer are set after the checks."""
    loss = settings.pop("grpo_loss_type", "grpo")
    return parse({"model": str(model)} | BASE | settings).model_copy(update={"grpo_loss_type": loss})


@dataclass
class Step:
    """One step's data: prompts [P], completions [P][G], rewards [P, G]."""

    prompts: list[list[int]]
    completions: list[list[list[int]]]
    rewards: np.ndarray

    def groups(self, config: Config) -> list[Group]:
        """The groups as the trainer passes them to the learner."""
        advantage_B, _ = advantages(self.rewards.reshape(-1, 1), G, scale_rewards=config.scale_rewards)
        each = iter(advantage_B.tolist())
        return [
            Group(
                Problem(i, "", [], prompt, ""),
                [Completion(tokens, [0.0] * len(tokens), "", "eos", advantage=next(each)) for tokens in rows],
            )
            for i, (prompt, rows) in enumerate(zip(self.prompts, self.completions, strict=True))
        ]


def random_steps(seed: int = 0, steps: int = STEPS, problems: int = P) -> list[Step]:
    """Prompts and completions of unequal lengths; the second problem's completions all have the same reward."""
    rng, data = np.random.default_rng(seed), []
    for _ in range(steps):
        prompts = [rng.integers(3, 320, rng.integers(1, 8)).tolist() for _ in range(problems)]
        completions = [
            [rng.integers(3, 320, rng.integers(1, LONGEST + 1)).tolist() for _ in range(G)] for _ in range(problems)
        ]
        rewards = rng.normal(size=(problems, G)).round(2)
        rewards[1] = 0.5
        data.append(Step(prompts, completions, rewards))
    return data


def learned(config: Config, steps: list[Step], **memory: Any) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    """Our weights after these steps, and the metrics of each."""
    policy = load_policy(config)
    learner = build_learner(policy, config, len(steps), **memory)
    metrics = [learner.learn(pack(step.groups(config), pad_id=policy.pad_id)) for step in steps]
    return {name: np.array(x) for name, x in policy.trainable().items()}, metrics


def test_a_gradient_that_is_not_finite_raises_before_anything_changes(model: Path) -> None:
    config, steps = config_of(model, num_iterations=2), random_steps()
    policy = load_policy(config)
    learner = build_learner(policy, config, STEPS)
    learner.learn(pack(steps[0].groups(config), pad_id=0))
    weights = {name: np.array(x) for name, x in policy.trainable().items()}
    memory = {name: np.array(x) for name, x in learner.state_arrays().items()}
    groups = steps[1].groups(config)
    groups[0].completions[0].advantage = math.nan
    with pytest.raises(NotFiniteError, match="loss: nan") as caught:
        learner.learn(pack(groups, pad_id=0))
    found = caught.value
    assert found.update == 3 and found.gradients[0].not_finite == found.gradients[0].size
    rows = sum(len(group.completions) for group in groups)
    assert sorted(found.tokens) == list(range(rows)) and all(map(math.isfinite, found.tokens[0]["learned_logp"]))
    assert learner.updates == 2
    assert all(np.array_equal(np.array(x), weights[name]) for name, x in policy.trainable().items())
    assert all(np.array_equal(np.array(x), memory[name]) for name, x in learner.state_arrays().items())


def test_weights_and_moments_are_whole_but_while_an_update_is_made(model: Path, monkeypatch: pytest.MonkeyPatch):
    """A number that is not finite is found before anything is touched; what fails half-way leaves nothing that may be
    saved."""
    config = config_of(model, **SGD)
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


def test_a_step_reports_every_metric(model: Path) -> None:
    _, metrics = learned(config_of(model, num_iterations=2), random_steps())
    for step in metrics:
        names = "loss kl entropy clip_ratio_low clip_ratio_high clip_ratio_total grad_norm learning_rate"
        assert set(names.split()) <= step.keys()
        assert all(math.isfinite(value) for value in step.values())
        assert 3 < step["entropy"] < math.log(320) + 1e-3


@pytest.mark.parametrize(
    "optimizer",
    ["adamw", *(pytest.param(name, marks=pytest.mark.proof) for name in ("muon", "adafactor", "sgd", "lion"))],
)
def test_a_restored_learner_continues_bit_for_bit(model: Path, optimizer: str) -> None:
    config, steps = (
        config_of(model, optimizer=optimizer, lr_schedule="cosine", lr_warmup_steps=1, lr_final=0),
        random_steps(steps=3),
    )
    unbroken, _ = learned(config, steps)
    first = load_policy(config)
    learner = build_learner(first, config, len(steps))
    learner.learn(pack(steps[0].groups(config), pad_id=0))
    second = load_policy(config)
    second.assign({name: mx.array(np.array(x)) for name, x in first.trainable().items()})
    resumed = build_learner(second, config, len(steps))
    resumed.restore({name: mx.array(np.array(x)) for name, x in learner.state_arrays().items()}, learner.updates)
    for step in steps[1:]:
        resumed.learn(pack(step.groups(config), pad_id=0))
    assert all(np.array_equal(np.array(x), unbroken[name]) for name, x in second.trainable().items())


def test_dropout_depends_on_the_seed_and_the_update_alone(model: Path) -> None:
    """Not on mlx's global random state: a resumed run must sample the same dropout masks as the uninterrupted one."""
    config = config_of(model, dropout=0.3)

    def first_step(seed: int = 0, updates: int = 0) -> dict[str, np.ndarray]:
        policy = load_policy(config)
        learner = build_learner(policy, config.model_copy(update={"seed": seed}), 1)
        learner.updates = updates
        mx.random.seed(np.random.default_rng().integers(1 << 30).item())
        learner.learn(pack(random_steps()[0].groups(config), pad_id=0))
        return {name: np.array(x) for name, x in policy.trainable().items()}

    plain = first_step()
    assert all(np.array_equal(x, plain[name]) for name, x in first_step().items())
    for changed in (first_step(seed=1), first_step(updates=1)):
        assert any(not np.array_equal(x, plain[name]) for name, x in changed.items())


def test_old_log_probabilities_are_computed_without_dropout(model: Path) -> None:
    """The old policy is the one that sampled, and sampling drops nothing; an update before left the model in training
    mode."""
    config = config_of(model, beta=0, dropout=0.5, sampling_correction="token_truncate")
    policy = load_policy(config)
    policy.assign({name: x + 0.1 for name, x in policy.trainable().items()})  # B = 0 would hide what is dropped before
    policy.model.train()
    learner = build_learner(policy, config, 1)
    (micro_batch,) = learner.algorithm.optimizer_batch(
        pack(random_steps()[0].groups(config), pad_id=0), learner.forward
    )
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
