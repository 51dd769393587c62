"""Penalties: the same policy in sampling and in learning, against a loop over tokens."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from backend.config.config import parse
from backend.engine.lm_head import token_logps
from backend.engine.penalties import CompletionHistory, Penalties, distinct_tokens
from backend.models.policy import Policy, load_policy
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling, keyed_uniforms, sample_tokens
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.types import Group, Problem
from tests.support import random_models

PENALTIES = Penalties(1.3, 0.7, 0.4)
SETTINGS = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
SAMPLED = Sampling(0.9, penalties=PENALTIES)
REPEATING = Sampling(0.9, penalties=Penalties(0.7, -0.8, -0.3))
"""The other way: tokens come back, so that counts above 1 occur."""
FILTERED = [Sampling(0.9, 0.8, 60, 0.1, PENALTIES), Sampling(0.9, 0.8, 0, 0.0, PENALTIES)]


def penalised_by_hand(logits_V: np.ndarray, prompt: list[int], completion: list[int], by: Penalties) -> np.ndarray:
    """As vLLM says it, a token at a time, in float64."""
    z = logits_V.astype(np.float64)
    for token in {*prompt, *completion}:
        z[token] = z[token] / by.repetition if z[token] > 0 else z[token] * by.repetition
    for token in set(completion):
        z[token] -= by.frequency * completion.count(token) + by.presence
    return z


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes policies with adapters that change something. A small vocabulary repeats tokens."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def policy(arch: str = "qwen3", **settings: Any) -> tuple[Policy, Any]:
        if not (folder / arch).exists():
            random_models.tiny_model(folder / arch, arch, noise=0.1)
        raw = {"model": str(folder / arch), "data": "none", "beta": 0, "num_layers": -1, "temperature": 0.9}
        raw |= {"top_k": 0, "top_p": 1, "group_size": 3, "batch_size": 3, "skip_zero_signal": False}
        config = parse(raw | settings)
        if arch not in made or settings.get("beta"):
            made[arch] = load_policy(config)
            mx.random.seed(1)
            weights = made[arch].model.trainable_parameters()
            made[arch].model.update(tree_map(lambda x: x + 0.2 * mx.random.normal(x.shape), weights))
            made[arch].eos_ids = [-1]
        return made[arch], config

    return policy


def problems() -> list[Problem]:
    rng = np.random.default_rng(0)
    return [Problem(i, "", [], rng.integers(60, 320, length).tolist() * 2, "") for i, length in enumerate([1, 4, 40])]


def log_softmax(z: np.ndarray, temperature: float) -> np.ndarray:
    z = z / temperature
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def by_hand(policy: Policy, group: Group, g: int, sampling: Sampling) -> np.ndarray:
    """Penalised logits [T, V] of a completion, from one pass of the whole model."""
    prompt, tokens = group.problem.tokens, group.completions[g].tokens
    logits = np.array(policy.model(mx.array([prompt + tokens]))[0])[len(prompt) - 1 : -1]
    return np.stack([penalised_by_hand(row, prompt, tokens[:t], sampling.penalties) for t, row in enumerate(logits)])


@pytest.mark.parametrize(
    ("arch", "together", "rows"), [("qwen3", True, 4), ("qwen3", False, None), ("gemma3_text", True, None)]
)
def test_tokens_and_logps_are_those_of_a_loop(policies: Any, arch: str, together: bool, rows: int | None) -> None:
    """Decoded together, with rows that wait, and by group; each token's random number gives that token."""
    policy, _ = policies(arch)
    rollout = Sampler(policy, 20, rows=rows)
    assert rollout.has_continuous_batching
    rollout.has_continuous_batching = together
    repeated = 0
    for p, group in enumerate(rollout.sample(problems(), 3, REPEATING, seed=5, first_number=0)):
        for g, completion in enumerate(group.completions):
            z_TV = by_hand(policy, group, g, REPEATING)
            logps = [log_softmax(z, 0.9)[token] for z, token in zip(z_TV, completion.tokens, strict=True)]
            np.testing.assert_allclose(completion.logps, logps, atol=1e-4)
            uniform_T = mx.array(keyed_uniforms(5, [(p, g)], 20)[0])
            again = sample_tokens(mx.array(z_TV.astype(np.float32)), uniform_T, Sampling(0.9))
            assert again.token_B.tolist() == completion.tokens
            repeated += len(completion.tokens) - len(set(completion.tokens))
    assert repeated > 5, "no token came twice, so frequency and presence were not tried"


@pytest.mark.parametrize("sampling", [SAMPLED, *FILTERED], ids=str)
def test_learning_has_the_log_probabilities_that_were_sampled(policies: Any, sampling: Sampling) -> None:
    """To 2e-5 in float32, through micro-batches and chunks of the head. Without penalties they are far off."""
    policy, config = policies(**SETTINGS)
    groups = Sampler(policy, 12).sample(problems(), 3, sampling, seed=2, first_number=0)
    for group in groups:
        for completion, advantage in zip(group.completions, (1.0, -1.0, 0.5), strict=True):
            completion.advantage = advantage
    gap = {}
    for penalised in (True, False):
        learner = build_learner(policy, config, 1, chunk=7, micro_batch_tokens=64)
        forward = learner.forward
        if not penalised:
            forward.penalties = Penalties()
        parts = forward.micro_batches(policy.split_model, pack(groups, pad_id=0), 3)
        assert len(parts) > 1
        logps = forward.logps_without_gradient(policy.split_model, parts)
        gap[penalised] = max(
            float(mx.abs(logp_BT - (part.batch.sampling_logp_BT + part.batch.log_kept_BT)).max())
            for part, logp_BT in zip(parts, logps, strict=True)
        )
    assert gap[True] < 2e-5 < 0.3 < gap[False]
    if not sampling.has_filters:
        assert build_learner(policy, config, 1).learn(pack(groups, pad_id=0))["sampling/logp_gap/max"] < 1e-5


def test_the_reference_is_penalised_too(policies: Any) -> None:
    """Fresh adapters change nothing, so the KL is 0 unless the policy alone is penalised."""
    policy, config = policies(beta=0.1, log_kl=True, **SETTINGS)
    policy.model.update(tree_map(mx.zeros_like, policy.model.trainable_parameters()))
    groups = Sampler(policy, 8).sample(problems(), 3, SAMPLED, seed=2, first_number=0)
    assert build_learner(policy, config, 1).learn(pack(groups, pad_id=0))["kl"] == pytest.approx(0, abs=1e-6)


def naive_scores(z_NV: mx.array, target_N: mx.array, history: CompletionHistory) -> tuple[mx.array, mx.array]:
    """By autodiff of dense arrays: counts as constants, `where` over the whole vocabulary."""
    by, seen = history.penalties, history.before(slice(None))
    count_NV = np.zeros(z_NV.shape, np.int64)
    for n, (tokens, weights) in enumerate(zip(np.array(seen.token_NL), np.array(seen.weight_NL), strict=True)):
        np.add.at(count_NV[n], tokens, weights)
    is_seen_NV, times_NV = mx.array(count_NV > 0), mx.array(count_NV // 2)
    factor_NV = mx.where(is_seen_NV, mx.where(z_NV > 0, 1 / by.repetition, by.repetition), 1.0)
    z_NV = z_NV * factor_NV - by.frequency * times_NV - by.presence * (times_NV > 0)
    logp_NV = nn.log_softmax(z_NV / 0.8, axis=-1)
    return mx.take_along_axis(logp_NV, target_N[:, None], axis=-1)[:, 0], -(mx.exp(logp_NV) * logp_NV).sum(axis=-1)


@pytest.mark.parametrize("kind", ["logits of the model", "frozen head", "trained head"])
@pytest.mark.parametrize("by", [PENALTIES, Penalties(0.6, -0.5, 0.0)], ids=str)
def test_gradients_are_those_of_plain_autodiff(kind: str, by: Penalties) -> None:
    """Of log-probabilities and entropies, in hidden states and weights, with a chunk that cuts rows. Tokens of the
    prompt that come several times count once, and a token in prompt and completion has both kinds of penalty."""
    mx.random.seed(3)
    head = nn.Linear(8, 30, bias=False)
    if kind == "frozen head":
        head.freeze()
    of_head = None if kind == "logits of the model" else head
    rng = np.random.default_rng(1)
    completion_BT = mx.array(rng.integers(0, 12, (2, 9)))
    position_N = mx.array([0, 1, 2, 5, 8, 9, 12, 15, 17])
    history = CompletionHistory(by, distinct_tokens([[3, 3, 4, 20], [5]]), completion_BT, position_N)
    hidden_NH, target_N = 2 * mx.random.normal((9, 8)), completion_BT.reshape(-1)[position_N]
    weight_N = mx.array(rng.normal(size=(2, 9)).astype(np.float32))

    def ours(weights: Any, x: mx.array) -> mx.array:
        head.update(weights)
        scores = token_logps(
            head, of_head, x, target_N, temperature=0.8, chunk=4, entropy_gradient=True, history=history
        )
        return (weight_N * mx.stack(list(scores.arrays))).sum()

    def naive(weights: Any, x: mx.array) -> mx.array:
        head.update(weights)
        return (weight_N * mx.stack(list(naive_scores(head(x), target_N, history)))).sum()

    weights = head.parameters()
    results = []
    for function in (ours, naive):
        value, (of_weights, of_hidden) = mx.value_and_grad(function, argnums=[0, 1])(weights, hidden_NH)
        head.update(weights)
        # A frozen head has no gradient of its own: only the hidden states' is compared.
        flat = [of_hidden, *([of_weights["weight"]] if kind == "trained head" else [])]
        results.append([np.array(value), *map(np.array, flat)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    constants = token_logps(
        head, of_head, hidden_NH, target_N, temperature=0.8, chunk=4, with_gradient=False, history=history
    )
    np.testing.assert_allclose(constants.logp_N, naive_scores(head(hidden_NH), target_N, history)[0], atol=1e-5)
