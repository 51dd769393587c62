"""Every loss and every setting of the objective, through the learner: an update equals plain automatic differentiation
of `policy_loss` over the whole batch, with a forward pass without micro-batches, skipped rows or shared prompts.
"""

import math
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from backend.config.config import Config, parse
from backend.engine.device import on_gpu
from backend.models.policy import Policy, load_policy
from backend.training import algorithms
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.training.grpo import loss_settings
from backend.training.losses import LEVELS, LOSSES, entropy_quantile, policy_loss
from backend.types import Group
from tests.support.reference_forward import (
    LONGEST,
    TEMPERATURE,
    G,
    P,
    Row,
    padded,
    plain_scores,
    rows_of,
    sampled_groups,
)
from tests.support.small_settings import PLAIN_SGD, SMALL_LORA, UNFILTERED

RATE = 0.02
LOSS = {"beta": 0.05, "epsilon": 2e-3, "epsilon_high": 3e-3, "temperature": TEMPERATURE, "num_iterations": 2}
SIZES = {"batch_size": P, "group_size": G, "max_completion_length": LONGEST}
BASE = SMALL_LORA | PLAIN_SGD | UNFILTERED | LOSS | SIZES | {"learning_rate": RATE}
"""Plain gradient descent, so that a weight's change is its gradient; two updates, so that ratios are not all 1."""
ONE_MICRO_BATCH, SEVERAL = 1 << 14, 60  # token budgets: everything in one micro-batch, and a handful of them


def config_of(model: Path, **settings: Any) -> Config:
    return parse({"model": str(model)} | BASE | settings)


@cache
def loaded(model: str, train_type: str, reference: bool, whose: str) -> tuple[Policy, dict[str, mx.array]]:
    """A policy and its initial weights; loading takes longer than a test, so each is reused."""
    changes = {"train_type": train_type, "beta": float(reference)}
    policy = load_policy(parse({"model": model} | BASE | changes))
    return policy, policy.trainable()


def perturbed(config: Config, whose: str = "the learner's") -> Policy:
    """A policy with non-zero adapters, different from its reference; the same at every call."""
    policy, initial = loaded(config.model, config.train_type, config.needs_reference, whose)
    mx.random.seed(0)
    policy.assign({name: x + 0.05 * mx.random.normal(x.shape) for name, x in initial.items()})
    mx.eval(policy.model.parameters())
    return policy


def weights_of(policy: Policy) -> dict[str, np.ndarray]:
    return {name: np.array(x) for name, x in policy.trainable().items()}


class Plain:
    """The updates of a rollout by gradient descent on `policy_loss` of the whole optimizer batch."""

    def __init__(self, config: Config, policy: Policy, start: nn.Module) -> None:
        """`policy` is updated; `start` is the reference, a model of its own."""
        self.config, self.policy, self.start = config, policy, start
        self.metrics: list[dict[str, float]] = []
        self.nearest = math.inf
        """The least distance of a ratio from a corner of the clip, and of an entropy from the threshold of the most
        uncertain tokens: at 0 rounding decides whether a token has a gradient, and BLAS kernels differ by processor."""

    def learn(self, groups: list[Group]) -> None:
        rows = rows_of(groups)
        old, ref = self._before(rows)
        for _ in range(self.config.num_iterations):
            self._update(rows, old, ref)

    def _before(self, rows: list[Row]) -> tuple[mx.array, mx.array]:
        old, _ = plain_scores(self.policy.model, rows, self.config.temperature)
        ref, _ = plain_scores(self.start, rows, self.config.temperature)
        mx.eval(old, ref)
        return (ref if self.config.ratio_against == "reference" else old), ref

    def _update(self, rows: list[Row], old: mx.array, ref: mx.array) -> None:
        config = self.config
        hidden = [config.mask_truncated_completions and completion.stop == "length" for _, completion in rows]
        mask = padded([[float(not h)] * len(row.tokens) for h, (_, row) in zip(hidden, rows, strict=True)])
        sampling_logps = padded([(np.array(completion.logps) - completion.log_kept).tolist() for _, completion in rows])
        correction = (
            {}
            if config.sampling_correction in ("none", "auto")
            else {"is_ratio": self._correction(old, sampling_logps, mask)}
        )

        def loss(weights: dict[str, mx.array]) -> tuple[mx.array, dict[str, mx.array], mx.array, mx.array]:
            self.policy.model.update(tree_unflatten(list(weights.items())))
            logps, entropies = plain_scores(self.policy.model, rows)
            value, metrics = policy_loss(
                logps,
                old,
                ref if config.needs_reference else None,
                mx.array([completion.advantage for _, completion in rows]),
                mx.array(mask),
                entropies=entropies,
                sampling_logps=mx.array(sampling_logps),
                **correction,
                **asdict(loss_settings(config)),
            )
            return value, metrics, logps, entropies

        (value, metrics, logps, entropies), gradient = mx.value_and_grad(loss)(self.policy.trainable())
        self.metrics.append({name: float(x) for name, x in metrics.items()} | {"loss": float(value)})
        self.policy.assign(
            {name: x - config.learning_rate * gradient[name] for name, x in self.policy.trainable().items()}
        )
        mx.eval(self.policy.model.parameters())
        ratio = LEVELS[config.importance_sampling_level].ratio((logps - old) * mask, mx.array(mask))
        corners = [1 - config.epsilon, 1 + (config.epsilon_high or config.epsilon), config.epsilon_high, config.delta]
        distances = [float(mx.abs(ratio - corner).min()) for corner in corners if corner is not None]
        if config.top_entropy_quantile < 1:
            threshold = entropy_quantile(entropies, mx.array(mask), config.top_entropy_quantile)
            gaps: Any = mx.sort(
                mx.abs(mx.where(mx.array(mask) > 0, entropies, mx.inf) - threshold).reshape(-1)
            ).tolist()
            distances.append(gaps[gaps[0] == 0])  # the token whose entropy is the threshold is chosen in any case
        self.nearest = min(self.nearest, *distances)

    def _correction(self, old: mx.array, sampling_logps: np.ndarray, mask: np.ndarray) -> mx.array:
        """π_old / π_sampler by the token or the completion, held within its limits or 0 outside of them."""
        gap = (np.array(old, np.float64) - sampling_logps) * mask
        kind, way = self.config.sampling_correction.split("_")
        ratio = np.exp(gap if kind == "token" else gap.sum(axis=1, keepdims=True))
        low, high = self.config.sampling_correction_min or 0.0, self.config.sampling_correction_max or np.inf
        inside = (ratio >= low) & (ratio <= high)
        assert inside.any() and not inside[mask[:, :1] > 0 if kind == "sequence" else mask > 0].all(), "no limit"
        return mx.array(np.clip(ratio, low, high) if way == "truncate" else ratio * inside, mx.float32)


def assert_same_changes(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], start: dict[str, np.ndarray]
) -> None:
    """The changes, which are gradients times the learning rate, agree to a ten-thousandth of the largest of them."""
    assert actual.keys() == expected.keys() == start.keys()
    largest = max(np.abs(expected[name] - start[name]).max() for name in start)
    assert largest > 1e-6, "nothing has changed, so this shows nothing"
    for name in start:
        difference = np.abs(actual[name] - expected[name]).max()
        assert difference < 1e-4 * largest + 1e-7, f"{name}: {difference:.1e} apart, weights changed by {largest:.1e}"


def away_from_ties(config: Config) -> tuple[Plain, list[Group]]:
    """The first completions under which no ratio comes near a corner of the clip and no entropy near its threshold, and
    the plain run on them."""
    for seed in range(20):
        policy = perturbed(config, "the plain one's")
        groups = sampled_groups(policy.model, seed=seed)
        plain = Plain(config, policy, loaded(config.model, config.train_type, False, "the start")[0].model)
        plain.learn(groups)
        if plain.nearest > 1e-5:
            return plain, groups
    raise AssertionError("every seed puts a ratio on a corner of the clip, or an entropy at the threshold")


def assert_equal_updates(monkeypatch: pytest.MonkeyPatch, config: Config) -> Plain:
    """The learner's updates are the plain ones, in one part and in many; the plain run is returned."""
    start = weights_of(perturbed(config))
    plain, groups = away_from_ties(config)
    expected = {name: np.mean([update[name] for update in plain.metrics]) for name in plain.metrics[0]}
    metrics: dict[str, float] = {}
    for budget in (ONE_MICRO_BATCH, SEVERAL):
        monkeypatch.setitem(algorithms.MICRO_BATCH_TOKENS, on_gpu(), budget)
        policy = perturbed(config)
        previous, metrics = metrics, build_learner(policy, config, 1).learn(pack_of(groups, config))
        assert_same_changes(weights_of(policy), weights_of(plain.policy), start)
        assert expected.keys() <= metrics.keys()
        for name, value in (metrics | previous | expected).items():
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name
    return plain


def mask_some_tokens(groups: list[Group], seed: int) -> None:
    """A third of the tokens of every completion are a tool's, at random positions."""
    rng = np.random.default_rng(seed)
    for _, completion in rows_of(groups):
        completion.mask = (rng.random(len(completion.tokens)) > 1 / 3).astype(int).tolist()


def pack_of(groups: list[Group], config: Config) -> Any:
    return pack(groups, pad_id=0, mask_truncated_completions=config.mask_truncated_completions)


CORRECTED = {"sampling_correction_min": 0.8, "sampling_correction_max": 1.6}
BY_ROW = {"sampling_correction_min": 0.05, "sampling_correction_max": 0.5}
SETTINGS_OF: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sequence": {"importance_sampling_level": "sequence", "epsilon": 5e-4, "epsilon_high": 6e-4},
    "sequence_token": {"importance_sampling_level": "sequence_token", "epsilon": 5e-4, "epsilon_high": 6e-4},
    "delta": {"delta": 1.0005, "epsilon_high": 2e-4},
    "entropy bonus": {"entropy_coef": 0.3},
    "most uncertain tokens": {"top_entropy_quantile": 0.37},
    "most uncertain token": {"top_entropy_quantile": 0.0, "train_type": "full"},
    "most uncertain tokens, with the bonus": {"top_entropy_quantile": 0.37, "entropy_coef": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.4},
    "token, truncated": {"sampling_correction": "token_truncate"} | CORRECTED,
    "token, masked": {"sampling_correction": "token_mask"} | CORRECTED,
    "sequence, truncated": {"sampling_correction": "sequence_truncate"} | BY_ROW,
    "sequence, masked": {"sampling_correction": "sequence_mask"} | BY_ROW,
    "truncated completions masked": {"mask_truncated_completions": True},
    "against the reference": {"ratio_against": "reference", "epsilon": 0.3, "epsilon_high": 0.3},
    "plain KL": {"use_bias_correction_kl": False, "beta": 0.5},
    "documented KL": {"kl_estimator": "documented", "beta": 0.5},
    "no reference": {"beta": 0.0, "skip_zero_signal": False},
    "recomputed": {"grad_checkpoint": True},
}


SETTINGS_NAMES, LOSS_NAMES = list(SETTINGS_OF), list(LOSSES)


def cases() -> list[Any]:
    """Every loss with defaults, GRPO with every setting, every fourth with another too; the full product is a proof."""
    others = [name for name in LOSS_NAMES if name != "grpo"]
    few = {(loss, "defaults") for loss in LOSS_NAMES} | {("grpo", name) for name in SETTINGS_NAMES}
    few |= {(others[i % len(others)], name) for i, name in enumerate(SETTINGS_NAMES) if i % 4 == 3}
    return [
        pytest.param(loss, name, marks=[] if (loss, name) in few else pytest.mark.proof)
        for name in SETTINGS_NAMES
        for loss in LOSS_NAMES
    ]


@pytest.mark.parametrize(("loss", "name"), cases())
def test_an_update_is_the_gradient_of_the_loss_over_the_whole_batch(model: Path, monkeypatch, loss: str, name: str):
    own = {"epsilon_high": 1.001} if loss == "cispo" else {}
    config = config_of(model, grpo_loss_type=loss, **SETTINGS_OF[name] | own)
    plain = assert_equal_updates(monkeypatch, config)
    if name == "defaults" and "clip_ratio_total" in plain.metrics[0]:
        assert plain.metrics[1]["clip_ratio_total"] > 0.1, "nothing is clipped, so this shows nothing of the clip"


def test_the_adaptive_bonus_is_adapted_after_each_update_and_applies_at_or_below_its_target(model: Path) -> None:
    """Entropies of a random model lie near log 320 = 5.8: above a target of 1 and below one of 9. Before the first is
    measured there is no bonus, as in TRL."""
    for target, begins, values, used in ((9.0, 0.1, [0.105, 0.110], [0, 0.105]), (1.0, 0.1, [0.095, 0.09], [0, 0])):
        config = config_of(model, entropy_coef=begins, entropy_adaptive=True, entropy_target=target, num_iterations=1)
        policy = perturbed(config)
        learner = build_learner(policy, config, 2)
        for value, coefficient in zip(values, used, strict=True):
            metrics = learner.learn(pack_of(sampled_groups(policy.model), config))
            assert learner.algorithm.state()[0] == pytest.approx(value)
            assert metrics["entropy_coef"] == pytest.approx(coefficient)
            assert metrics["policy_loss"] - metrics["loss"] == pytest.approx(coefficient * metrics["entropy"], rel=1e-3)


def test_the_adaptive_bonus_looks_at_the_tokens_that_it_acts_on(model: Path) -> None:
    """As in TRL: of the most uncertain tokens the entropy is above that of all."""
    config = config_of(model, entropy_adaptive=True, top_entropy_quantile=0.2, num_iterations=1)
    policy = perturbed(config)
    learner = build_learner(policy, config, 1)
    metrics = learner.learn(pack_of(sampled_groups(policy.model), config))
    _, entropy = learner.algorithm.state()
    assert entropy is not None and entropy > metrics["entropy"] + 0.01 and not any("bonus" in name for name in metrics)


def without_signal(groups: list[Group]) -> list[Group]:
    for _, completion in rows_of(groups):
        completion.advantage = 0.0
    return groups


def three_steps(
    config: Config, silent_steps: set[int]
) -> tuple[dict[str, np.ndarray], list[int], list[dict[str, float]]]:
    """Weights after three steps, rows forwarded in each, the metrics; `silent_steps` steps have no signal at all."""
    policy = perturbed(config)
    learner, hidden, rows = build_learner(policy, config, 3), policy.split_model.hidden, [0]
    batches = [sampled_groups(policy.model, seed=step) for step in range(3)]
    counted, metrics = [], []
    with pytest.MonkeyPatch.context() as patch:
        seen = lambda tokens, cache=None: rows.append(rows.pop() + len(tokens)) or hidden(tokens, cache)  # noqa: E731
        patch.setattr(policy.split_model, "hidden", seen)
        for step, groups in enumerate(batches):
            metrics.append(learner.learn(pack_of(without_signal(groups) if step in silent_steps else groups, config)))
            counted.append(rows[0])
            rows[0] = 0
    return weights_of(policy), counted, metrics


ADAMW = {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1}


@pytest.mark.parametrize("silent_steps", [set(), {1}, {0, 1, 2}], ids=["no step", "one step", "every step"])
@pytest.mark.parametrize(
    "loss", [pytest.param(loss, marks=[] if loss in ("grpo", "vespo") else pytest.mark.proof) for loss in LOSSES]
)
def test_skipping_rows_without_signal_changes_no_weight(model: Path, loss: str, silent_steps: set[int]) -> None:
    """Momentum and weight decay go on in a step without any signal, and no forward pass is run for it."""
    settings = {"grpo_loss_type": loss, "beta": 0.0} | ADAMW
    (on, fewer, metrics), (off, all_rows, _) = (
        three_steps(config_of(model, skip_zero_signal=skip, **settings), silent_steps) for skip in (True, False)
    )
    largest = max(np.abs(x).max() for x in off.values())
    assert all(np.abs(x - off[name]).max() < 1e-5 * largest for name, x in on.items())
    assert all_rows == [2 * P * (1 + G)] * 3, "a prompt is read once for its completions"
    assert fewer == [0 if step in silent_steps else 2 * (P - 1) * (1 + G) for step in range(3)], (
        "the second group has no signal"
    )
    assert all((step["loss"], step["grad_norm"]) == (0, 0) for i, step in enumerate(metrics) if i in silent_steps)
