"""Given completions and rewards, the weights after a few steps equal those of an independent implementation of the
papers.

`Reference` shares no code with the backend: its own advantages, its own log-probabilities (one row at a time, the whole
vocabulary), its own loss, its own AdamW. Only the model's forward pass and automatic differentiation are mlx's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm import load

from backend.config.config import Config, parse
from backend.models.policy import load_policy
from backend.training.advantages import advantages
from backend.training.batch import pack
from backend.training.grpo import STANDARD_ERROR, grpo_learner
from backend.training.not_finite import NotFiniteError
from backend.types import Completion, Group, Problem
from tests.support import random_models

STEPS, P, G, LONGEST = 2, 3, 4, 9
"""Steps, problems a step, completions a problem, tokens of the longest completion."""
BASE = {
    "data": "none", "num_layers": -1, "rank": 4, "scale": 2.0, "batch_size": P, "group_size": G, "beta": 0.05,
    "learning_rate": 3e-3, "epsilon": 5e-3, "epsilon_high": 8e-3, "max_completion_length": LONGEST, "temperature": 0.8,
    "max_grad_norm": 1.0, "weight_decay": 0.1, "top_p": 1.0, "top_k": 0,
}  # fmt: skip
SGD = {"optimizer": "sgd", "learning_rate": 2e-2, "weight_decay": 0.0}
"""Where two ways to the same gradient are compared: AdamW divides by a gradient's size, so that of a weight whose
gradient is nearly 0 it would show rounding alone."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.tiny_model(tmp_path_factory.mktemp("models") / "qwen3", layers=1)


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
    learner = grpo_learner(policy, config, len(steps), **memory)
    metrics = [learner.learn(pack(step.groups(config), pad_id=policy.pad_id)) for step in steps]
    return {name: np.array(x) for name, x in policy.trainable().items()}, metrics


class Reference:
    """GRPO from the papers, in plain mlx: slow, one row at a time, nothing shared."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = load_policy(config).model  # with adapters as seeded; updated by this class alone
        self.model.train()
        self.start = load(config.model)[0]
        self.weights = dict(tree_flatten(self.model.trainable_parameters()))
        self.m = {name: mx.zeros_like(x) for name, x in self.weights.items()}
        self.v = {name: mx.zeros_like(x) for name, x in self.weights.items()}
        self.t = 0
        self.rounding = {name: np.full(x.shape, 1e-6) for name, x in self.weights.items()}
        """How far rounding may move each weight. A gradient is right to some 1e-6 of the largest one; AdamW divides
        that by the weight's own, so where this is near 0 an update is rounding, a different one on every processor."""
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.clipped: list[float] = []
        self.nearest = math.inf
        """The least distance of a ratio from a corner of the clip, where rounding decides which gradient there is."""

    def step(self, step: Step) -> None:
        rows = [(p, c) for p, group in zip(step.prompts, step.completions, strict=True) for c in group]
        scores = self.advantages(step.rewards)
        old = [self.logps(self.model, p, c) for p, c in rows]
        ref = [self.logps(self.start, p, c) for p, c in rows] if self.config.needs_reference else old
        if self.config.ratio_against == "reference":
            old = ref
        mx.eval(old, ref)
        for _ in range(self.config.num_iterations):
            self.update(rows, scores, old, ref)

    def advantages(self, rewards: np.ndarray) -> list[float]:
        centred = rewards - rewards.mean(axis=1, keepdims=True)
        if self.config.scale_rewards == "none":
            return centred.reshape(-1).tolist()
        std = (
            rewards.std(axis=1, ddof=1, keepdims=True) if self.config.scale_rewards == "group" else rewards.std(ddof=1)
        )
        return (centred / (std + 1e-4)).reshape(-1).tolist()

    def logps(self, model: nn.Module, prompt: list[int], completion: list[int]) -> mx.array:
        logits = model(mx.array([prompt + completion]))[0] / self.config.temperature
        logp_TV = nn.log_softmax(logits[len(prompt) - 1 : -1], axis=-1)
        return mx.take_along_axis(logp_TV, mx.array(completion)[:, None], axis=1)[:, 0]

    def update(self, rows: list[Any], scores: list[float], old: list[mx.array], ref: list[mx.array]) -> None:
        def loss(weights: dict[str, mx.array]) -> mx.array:
            self.model.update(tree_unflatten(list(weights.items())))
            new = [self.logps(self.model, p, c) for p, c in rows]
            return self.averaged([self.terms(*row) for row in zip(new, old, ref, scores, strict=True)])

        value, grads = mx.value_and_grad(loss)(self.weights)
        norm = math.sqrt(sum(mx.square(g).sum().item() for g in grads.values()))
        shorter = min(1.0, self.config.max_grad_norm / (norm + 1e-6)) if self.config.max_grad_norm else 1.0
        clipped = {name: g * shorter for name, g in grads.items()}
        self.sgd(clipped) if self.config.optimizer == "sgd" else self.adamw(clipped)
        self.losses.append(value.item())
        self.norms.append(norm)

    def terms(self, new: mx.array, old: mx.array, ref: mx.array, score: float) -> mx.array:
        ratio = mx.exp(new - old)
        if self.config.importance_sampling_level == "sequence":
            ratio = mx.broadcast_to(mx.exp((new - old).mean()), new.shape)
        low, high = 1 - self.config.epsilon, 1 + (self.config.epsilon_high or self.config.epsilon)
        outside = (ratio < low) if score < 0 else (ratio > high)
        distance = mx.stop_gradient(mx.minimum(mx.abs(ratio - low), mx.abs(ratio - high)))
        self.nearest = min(self.nearest, distance.min().item())
        self.clipped.append(mx.stop_gradient(outside).astype(mx.float32).mean().item() if score else 0.0)
        term = -mx.minimum(ratio * score, mx.clip(ratio, low, high) * score)
        if self.config.kl_estimator == "documented":
            return term + self.config.beta * (ratio * mx.exp(ref - new) - (ref - new) - 1)
        kl = mx.exp(ref - new) - (ref - new) - 1
        return term + self.config.beta * kl * (ratio if self.config.use_bias_correction_kl else 1.0)

    def averaged(self, terms: list[mx.array]) -> mx.array:
        """The loss of a batch from each row's token terms, by the name of the loss."""
        if self.config.grpo_loss_type == "grpo":
            return sum((row.mean() for row in terms), mx.array(0.0)) / len(terms)
        total = sum((row.sum() for row in terms), mx.array(0.0))
        if self.config.grpo_loss_type == "dr_grpo":
            return total / (len(terms) * self.config.max_completion_length)
        return total / sum(row.size for row in terms)  # bnpo and dapo: over all tokens of the update

    def adamw(self, grads: dict[str, mx.array]) -> None:
        """Loshchilov and Hutter, algorithm 2, with bias correction, as torch has it."""
        c, self.t = self.config, self.t + 1
        b1, b2, rate = c.adam_beta1, c.adam_beta2, c.learning_rate
        largest = max(mx.abs(g).max().item() for g in grads.values())
        for name, g in grads.items():
            self.m[name] = b1 * self.m[name] + (1 - b1) * g
            self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
            mean, square = self.m[name] / (1 - b1**self.t), self.v[name] / (1 - b2**self.t)
            self.weights[name] = self.weights[name] * (1 - rate * c.weight_decay) - rate * mean / (
                mx.sqrt(square) + 1e-8
            )
            self.rounding[name] += np.where(np.array(g) == 0, 0, rate * 2e-6 * largest / (np.sqrt(square) + 1e-8))
        mx.eval(self.weights, self.m, self.v)
        self.model.update(tree_unflatten(list(self.weights.items())))

    def sgd(self, grads: dict[str, mx.array]) -> None:
        self.weights = {name: x - self.config.learning_rate * grads[name] for name, x in self.weights.items()}
        mx.eval(self.weights)
        self.model.update(tree_unflatten(list(self.weights.items())))


def away_from_ties(config: Config) -> tuple[Reference, list[Step]]:
    """The first random data on which no ratio comes near a corner of the clip, and the reference after it: at a corner
    rounding decides between two gradients, and two correct implementations diverge."""
    for seed in range(20):
        reference, steps = Reference(config), random_steps(seed)
        for step in steps:
            reference.step(step)
        if reference.nearest > 5e-6:
            return reference, steps
    raise AssertionError("every seed puts a ratio on a corner of the clip")


def assert_equal_steps(config: Config) -> tuple[Reference, list[dict[str, float]]]:
    """Our weights after the steps are the reference's; the reference and our metrics are returned."""
    start = {name: np.array(x) for name, x in load_policy(config).trainable().items()}
    reference, steps = away_from_ties(config)
    weights, metrics = learned(config, steps)
    assert weights.keys() == reference.weights.keys()
    for name, x in weights.items():
        expected, allowed = np.array(reference.weights[name]), reference.rounding[name]
        assert (np.abs(x - expected) < allowed).all(), f"{name}: {np.abs(x - expected).max():.1e} apart"
        changes = np.abs(expected - start[name])
        assert changes.max() > 1e-4, f"{name} has hardly changed, so this shows nothing"
        assert np.median(allowed) < 3e-2 * changes.max(), f"{name}: more is allowed than this comparison is worth"
    mu = config.num_iterations
    means = [np.mean(reference.losses[i : i + mu]) for i in range(0, len(reference.losses), mu)]
    np.testing.assert_allclose([step["loss"] for step in metrics], means, atol=1e-6)
    norms = [np.mean(reference.norms[i : i + mu]) for i in range(0, len(reference.norms), mu)]
    np.testing.assert_allclose([step["grad_norm"] for step in metrics], norms, rtol=1e-4)
    return reference, metrics


@pytest.mark.parametrize(
    ("loss", "mu"),
    [
        ("grpo", 2),
        ("dapo", 1),
        *(
            pytest.param(*case, marks=pytest.mark.proof)
            for case in (("grpo", 1), ("bnpo", 2), ("dr_grpo", 2), ("dapo", 2))
        ),
    ],
)
def test_steps_equal_an_independent_implementation(model: Path, loss: str, mu: int) -> None:
    reference, metrics = assert_equal_steps(config_of(model, grpo_loss_type=loss, num_iterations=mu))
    assert all((step["clip_ratio_total"] > 0.05) == (mu == 2) for step in metrics)
    assert (max(reference.clipped) > 0) == (mu == 2)


def assert_same_weights(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    """For weights trained with `SGD`: some 1e-4 of the largest change."""
    for name, x in first.items():
        assert np.abs(x - second[name]).max() < 1e-6, name


def test_a_gradient_that_is_not_finite_raises_before_anything_changes(model: Path) -> None:
    config, steps = config_of(model, num_iterations=2), random_steps()
    policy = load_policy(config)
    learner = grpo_learner(policy, config, STEPS)
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


def test_weights_and_moments_are_whole_but_while_an_update_is_made(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that is not finite is found before anything is touched; what fails half-way leaves nothing that may be
    saved."""
    config = config_of(model, **SGD)
    policy = load_policy(config)
    learner = grpo_learner(policy, config, 1)
    ones, first = tree_map(mx.ones_like, policy.parameters()), min(policy.trainable())
    unit = tree_unflatten([
        (name, mx.zeros_like(x).at[0, 0].add(float(name == first))) for name, x in policy.trainable().items()
    ])  # fmt: skip
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
        assert {
            "loss",
            "kl",
            "entropy",
            "clip_ratio_low",
            "clip_ratio_high",
            "clip_ratio_total",
            "grad_norm",
            "learning_rate",
        } <= step.keys()
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
    learner = grpo_learner(first, config, len(steps))
    learner.learn(pack(steps[0].groups(config), pad_id=0))
    second = load_policy(config)
    second.assign({name: mx.array(np.array(x)) for name, x in first.trainable().items()})
    resumed = grpo_learner(second, config, len(steps))
    resumed.restore({name: mx.array(np.array(x)) for name, x in learner.state_arrays().items()}, learner.updates)
    for step in steps[1:]:
        resumed.learn(pack(step.groups(config), pad_id=0))
    assert all(np.array_equal(np.array(x), unbroken[name]) for name, x in second.trainable().items())


def test_dropout_depends_on_the_seed_and_the_update_alone(model: Path) -> None:
    """Not on mlx's global random state: a resumed run must sample the same dropout masks as the uninterrupted one."""
    config = config_of(model, dropout=0.3)

    def first_step(seed: int = 0, updates: int = 0) -> dict[str, np.ndarray]:
        policy = load_policy(config)
        learner = grpo_learner(policy, config.model_copy(update={"seed": seed}), 1)
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
    policy.assign(
        {name: x + 0.1 for name, x in policy.trainable().items()}
    )  # B = 0 would hide what is dropped before it
    policy.model.train()
    learner = grpo_learner(policy, config, 1)
    (micro_batch,) = learner.algorithm.optimizer_batch(
        pack(random_steps()[0].groups(config), pad_id=0), learner.forward
    )
    policy.model.eval()
    (logp_BT,) = learner.forward.logps_without_gradient(policy.split_model, [micro_batch])
    assert np.array_equal(np.array(micro_batch.batch.old_logp_BT), np.array(logp_BT))


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.05},
        {"beta": 0.0, "log_kl": True, "epsilon": 0.2},
        {"beta": 0.05, "entropy_coef": 0.01, "top_entropy_quantile": 0.5},
        {"beta": 0.0, "dropout": 0.3},
    ],
    ids=["kl", "kl-measured", "other-terms", "dropout"],
)
def test_entropy_and_kl_of_completions_that_are_not_learned_from_are_those_of_a_step(
    model: Path, settings: dict[str, Any]
) -> None:
    """In the second step, where the policy has left the reference; and measuring changes no weight and no later
    step."""
    config = config_of(model, **settings)
    first, second = random_steps()
    policy = load_policy(config)
    learner = grpo_learner(policy, config, 10, micro_batch_tokens=40)
    learner.learn(pack(first.groups(config), pad_id=0))
    batch = pack(second.groups(config), pad_id=0)
    before = {name: np.array(array) for name, array in policy.trainable().items()}
    polled: list[int] = []
    held_out = learner.held_out_metrics(batch, lambda: polled.append(1))
    measured = {"entropy", "kl"} if config.needs_reference else {"entropy"}
    assert held_out.keys() == measured | {f"{name}{STANDARD_ERROR}" for name in measured} and len(polled) > 1
    assert_same_weights(before, {name: np.array(array) for name, array in policy.trainable().items()})
    if config.dropout:  # a step's entropy is that of what dropout left
        assert held_out == learner.held_out_metrics(batch)
        return
    step = learner.learn(batch)
    assert held_out["entropy"] == pytest.approx(step["entropy"], rel=1e-5)
    if "kl" in measured:
        # A KL of d²/2 is off by d times the rounding of d, which has that of the log probabilities it is the difference
        # of.
        rounding = 4 * float(np.finfo(np.float32).eps) * step["entropy"]
        assert held_out["kl"] == pytest.approx(step["kl"], rel=1e-5, abs=math.sqrt(2 * step["kl"]) * rounding)
        assert held_out["kl"] > 0
