"""The reference of the KL term: a copy that follows the policy, or an adapter of the base trained before."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from backend.config.config import Config, parse
from backend.engine.embedding_noise import EmbeddingNoise, input_embedding
from backend.models.loading import load_model
from backend.models.policy import Policy, load_policy
from backend.runs import checkpoint
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.sampling.grammar import CompiledGrammar, Grammar
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.training.algorithms import build_learner
from backend.training.batch import Batch, pack
from backend.training.grpo import correction_mode
from backend.types import Problem
from tests.support import random_models, small_run
from tests.support.adapters import save_adapters
from tests.support.reference_forward import plain_scores, rows_of, sampled_groups
from tests.support.small_settings import PLAIN_SGD, UNFILTERED

ALPHA = 0.3
FOLLOWING: dict[str, Any] = {
    "sync_ref_model": True,
    "ref_model_mixup_alpha": ALPHA,
    "ref_model_sync_steps": 2,
    "beta": 0.05,
    "learning_rate": 1e-2,
}
TRAIN_TYPES = ["lora", "dora", "full"]


def config_of(models: Path, arch: str = "qwen3", **settings: Any) -> Config:
    folder = models / arch
    if not folder.exists():
        random_models.tiny_model(folder, arch, layers=1)
    about = {"data": "none", "num_layers": -1, "rank": 2, "batch_size": 3, "top_p": 1.0, "top_k": 0}
    return parse({"model": str(folder)} | about | settings)


def batch_for(policy: Policy, seed: int) -> Batch:
    return pack(sampled_groups(policy.model, seed=seed), pad_id=0)


def numbers(arrays: dict[str, mx.array]) -> dict[str, np.ndarray]:
    return {name: np.array(x) for name, x in arrays.items()}


def largest_difference(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    assert first.keys() == second.keys()
    return max(float(np.abs(x - second[name]).max()) for name, x in first.items())


def perturb(policy: Policy) -> None:
    """Add noise to the adapters, which start at zero."""
    mx.random.seed(1)
    policy.assign({name: x + 0.1 * mx.random.normal(x.shape) for name, x in policy.trainable().items()})
    mx.eval(policy.model.parameters())


@pytest.mark.parametrize("train_type", TRAIN_TYPES)
def test_the_reference_starts_as_the_policy_and_moves_by_the_formula_at_its_interval(models: Path, train_type: str):
    """reference ← (1 − α)·reference + α·policy, after every second update; unchanged in between."""
    config = config_of(models, train_type=train_type, **FOLLOWING)
    policy = load_policy(config)
    learner = build_learner(policy, config, 5)
    expected = numbers(policy.trainable())
    assert largest_difference(numbers(policy.reference_arrays()), expected) == 0
    for update in range(1, 6):
        metrics = learner.learn(batch_for(policy, update))
        assert (metrics["kl"] == pytest.approx(0, abs=1e-8)) == (update == 1)
        weights = numbers(policy.trainable())
        if update % 2 == 0:
            expected = {name: (1 - ALPHA) * x + ALPHA * weights[name] for name, x in expected.items()}
        assert largest_difference(numbers(policy.reference_arrays()), expected) < 1e-6
        assert largest_difference(weights, expected) > 1e-3, "the policy has not changed, so this shows nothing"


def test_the_kl_is_against_where_the_reference_has_moved_to(models: Path) -> None:
    """By hand: the k3 estimate from two plain forward passes, the reference's with its own arrays put into a model."""
    config = config_of(models, **FOLLOWING)
    policy = load_policy(config)
    learner = build_learner(policy, config, 3)
    for update in (1, 2):
        learner.learn(batch_for(policy, update))
    groups = sampled_groups(policy.model, seed=3)
    moved = load_policy(config)
    moved.assign(policy.reference_arrays())
    metrics = learner.learn(pack(groups, pad_id=0))
    # The policy's own log-probabilities were changed by that update: they are taken from the run of two updates before.
    before = load_policy(config)
    again = build_learner(before, config, 3)
    for update in (1, 2):
        again.learn(batch_for(before, update))
    before.model.eval()
    assert metrics["kl"] == pytest.approx(k3(before.model, moved.model, groups), rel=1e-3)
    assert metrics["kl"] > 1e-6


def k3(policy: Any, reference: Any, groups: list[Any]) -> float:
    """The mean over all tokens of exp(d) − d − 1, d = log π_ref − log π, in float64."""
    rows = rows_of(groups)
    logp, ref = (np.array(plain_scores(model, rows)[0], np.float64) for model in (policy, reference))
    gaps = np.concatenate(
        [
            r[: len(completion.tokens)] - p[: len(completion.tokens)]
            for (_, completion), p, r in zip(rows, logp, ref, strict=True)
        ]
    )
    return float((np.exp(gaps) - gaps - 1).mean())


@pytest.mark.parametrize(
    "train_type", ["lora", pytest.param("dora", marks=pytest.mark.proof), pytest.param("full", marks=pytest.mark.proof)]
)
def test_a_resumed_run_has_the_same_reference(tmp_path: Path, train_type: str) -> None:
    """Stopped after step 3, where the reference has moved once and the policy since; α and interval as above."""
    raw = small_run.settings_for(tmp_path / "parts", train_type=train_type, iters=5, save_every=5, **FOLLOWING)
    raw |= small_run.low_half(tmp_path)
    unbroken, broken = RunFolder(tmp_path / "unbroken"), RunFolder(tmp_path / "broken")
    assert small_run.train_here(raw, unbroken).kind == "finished"

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 3:
            broken.say("stop")

    assert small_run.train_here(raw, broken, stop).step == 3
    assert small_run.train_here(raw, broken).kind == "finished"
    saved = [checkpoint.newest(run) for run in (unbroken, broken)]
    assert all(each is not None and each.state.step == 5 and each.has("reference") for each in saved)
    for part in ("weights", "reference", "optimizer"):
        first, second = (numbers(checkpoint.arrays_of(each, part)) for each in saved)
        assert largest_difference(first, second) == 0, part
    kls = [[e["metrics"]["kl"] for e in read_events(run.events) if e["kind"] == "step"] for run in (unbroken, broken)]
    assert kls[0] == kls[1] and kls[0][-1] > 0


def adapter(models: Path, folder: Path, arch: str = "qwen3", **settings: Any) -> Path:
    """An adapter folder as a finished run has it."""
    config = config_of(models, arch, beta=0, **settings)
    policy = load_policy(config)
    perturb(policy)
    save_adapters(policy, config, folder)
    return folder


@pytest.fixture(scope="module")
def noise_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.tiny_model(tmp_path_factory.mktemp("models") / "qwen3")


def noise_config_of(folder: Path, **settings: Any) -> Config:
    plain = {"optimizer": "sgd", "learning_rate": 1e-2, "max_grad_norm": 0, "beta": 0.0, "num_layers": -1}
    return parse({"model": str(folder), "data": "none", "neftune_noise_alpha": 5.0} | plain | settings)


def learned(config: Config, *, updates: int = 0, **memory: Any) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """(the adapters after one step, its metrics); `updates`: those before it."""
    policy = load_policy(config)
    learner = build_learner(policy, config, 4, **memory)
    learner.updates = updates
    metrics = learner.learn(pack(sampled_groups(policy.model), pad_id=0))
    return {name: np.array(x) for name, x in policy.trainable().items()}, metrics


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(x, b[name]) for name, x in a.items())


def test_noise_is_repeated_by_a_resume_and_changes_with_seed_and_rollout(noise_folder: Path) -> None:
    config = noise_config_of(noise_folder)
    weights, _ = learned(config, updates=3)
    assert same(weights, learned(config, updates=3)[0])
    others = [
        learned(config, updates=4)[0],
        learned(noise_config_of(noise_folder, neftune_noise_alpha=0.0), updates=3)[0],
    ]
    assert not any(same(weights, other) for other in others)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 1, "steps_per_generation": 2}], ids=["one", "two"])
def test_the_ratio_is_1_at_the_first_update(noise_folder: Path, settings: dict[str, Any]) -> None:
    """Of noise that only one of its two passes had, an epsilon of 1e-4 would clip half of the tokens."""
    _, metrics = learned(noise_config_of(noise_folder, epsilon=1e-4, learning_rate=1e-12, **settings))
    assert metrics["clip_ratio_total"] == 0.0


def test_a_row_has_the_noise_of_its_own_length_and_number(noise_folder: Path) -> None:
    model = load_model(str(noise_folder), "model")[0]
    noise = EmbeddingNoise(input_embedding(model), 5.0, seed=1, rollout=2)
    tokens, clean = mx.array([[5, 6, 7, 8], [5, 6, 0, 0]]), noise.embedding(mx.array([[5, 6, 7, 8], [5, 6, 0, 0]]))
    with noise.on([7, 9], [4, 2]):
        added = np.array(noise.embedding(tokens) - clean)
    with noise.on([9], [2]):
        alone = np.array(noise.embedding(tokens[1:, :3]) - clean[1:, :3])
    np.testing.assert_allclose(alone[0], added[1, :3], atol=1e-6)
    assert not added[1, 2:].any() and np.abs(added[0, :2] - added[1, :2]).min() > 0
    for row, length in ((0, 4), (1, 2)):
        bound = 5.0 / np.sqrt(length * clean.shape[-1])
        assert 0.9 * bound < np.abs(added[row, :length]).max() <= bound * 1.0001
    assert mx.array_equal(noise.embedding(tokens), clean)  # outside there is none


@pytest.mark.parametrize(("arch", "keys"), [("qwen3", ["embed_tokens"]), ("gemma3_text", []), ("phi3", [])], ids=str)
def test_the_embedding_is_found_by_a_pass_and_may_have_an_adapter(tmp_path: Path, arch: str, keys: list[str]) -> None:
    model: Any = load_policy(noise_config_of(random_models.tiny_model(tmp_path / arch, arch), lora_keys=keys)).model
    assert input_embedding(model) is model.model.embed_tokens and hasattr(model.model.embed_tokens, "lora_a") == bool(
        keys
    )


REGEX, LONGEST, BATCH, BATCHES = "(7|th)[ae]?", 4, 96, 12
PROMPT = [70, 71, 72]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.tiny_model(tmp_path_factory.mktemp("toy") / "model", noise=0.1)


def settings(folder: Path, **changes: Any) -> Config:
    """SGD with rate 1 from a loss that is a plain mean: the step that the weights take is the gradient."""
    raw = {"model": str(folder), "data": "none", "num_layers": 1, "rank": 2, "output_regex": REGEX}
    loss = {"grpo_loss_type": "dr_grpo", "beta": 0, "temperature": 1, "learning_rate": 1.0}
    sizes = {"max_completion_length": LONGEST, "batch_size": 1, "group_size": BATCH}
    return parse(raw | UNFILTERED | PLAIN_SGD | loss | sizes | changes)


def toy(config: Config) -> Policy:
    """A policy with adapters that change something, and to which the grammar's tokens are about as likely as others."""
    policy = load_policy(config)
    mx.random.seed(1)
    policy.model.update(tree_map(lambda x: x + 0.5 * mx.random.normal(x.shape), policy.model.trainable_parameters()))
    table = policy.model.model.embed_tokens  # pyright: ignore
    likely = mx.zeros((table.weight.shape[0], 1)).at[mx.array([token for y in outputs(policy) for token in y])].add(1)
    table.weight = mx.where(likely > 0, table.weight, 0.2 * table.weight)
    return policy


def outputs(policy: Policy) -> list[list[int]]:
    """Every output of the grammar, in every way of writing it in tokens, with its end of sequence."""
    size = policy.split_model.vocab_size
    compiled = CompiledGrammar(Grammar("regex", REGEX), policy.tokenizer, policy.eos_ids, size)
    found, pending = [], [([], compiled.matcher())]
    while pending:
        tokens, matcher = pending.pop()
        bits = np.unpackbits(compiled.masks([matcher])[0].view(np.uint8), bitorder="little")[:size]
        for token in np.flatnonzero(bits).tolist():
            if token in policy.eos_ids:
                found.append([*tokens, token])
                continue
            following = matcher.deep_copy()
            following.consume_token(token)
            pending.append(([*tokens, token], following))
    return found


def reward(tokens: list[int]) -> float:
    return float(np.sin(sum(tokens) + len(tokens)))


def exact_gradient(policy: Policy) -> np.ndarray:
    """∇J / LONGEST, as the loss divides by it, by autodiff of the sum over all outputs."""

    def objective(parameters: Any) -> mx.array:
        policy.model.update(parameters)
        total = mx.array(0.0)
        for y in outputs(policy):
            logits = policy.model(mx.array([PROMPT + y]))[0, len(PROMPT) - 1 : -1]  # pyright: ignore
            logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            total = total + mx.exp(mx.take_along_axis(logps, mx.array(y)[:, None], axis=-1).sum()) * reward(y)
        return total / LONGEST

    parameters = policy.model.trainable_parameters()
    gradient = mx.grad(objective)(parameters)
    policy.model.update(parameters)
    return flat(gradient)


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.array(array, np.float64).reshape(-1) for _, array in sorted(tree_flatten(tree))])


def estimated_gradients(policy: Policy, config: Config) -> np.ndarray:
    """[BATCHES, parameters]: what the learner makes of as many batches of held samples."""
    parameters = policy.model.trainable_parameters()
    rollout, learner = Sampler(policy, LONGEST), build_learner(policy, config, 1)
    rows = []
    for number in range(BATCHES):
        groups = rollout.sample([Problem(0, "", [], PROMPT, "")], BATCH, Sampling.of(config), 0, number)
        for completion in groups[0].completions:
            completion.advantage = reward(completion.tokens)
        learner.learn(pack(groups, pad_id=0))
        rows.append(flat(policy.model.trainable_parameters()) - flat(parameters))
        policy.set_parameters(parameters)
    return np.stack(rows)


def standard_errors_off(gradients: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """How far the mean lies from the exact gradient in standard errors: along it, and along five random directions."""
    rng = np.random.default_rng(3)
    directions = np.stack([exact, *rng.normal(size=(5, len(exact)))])
    projected = (gradients - exact) @ directions.T
    return np.abs(projected.mean(axis=0)) / (projected.std(axis=0, ddof=1) / np.sqrt(len(projected)))


def test_the_corrected_gradient_is_the_policy_s(folder: Path) -> None:
    """Automatic: within 2 standard errors over 1,152 samples."""
    config = settings(folder)
    assert correction_mode(config, mx.float32)[0] == "sequence_truncate"
    policy = toy(config)
    exact = exact_gradient(policy)
    assert standard_errors_off(estimated_gradients(policy, config), exact).max() < 2


@pytest.mark.proof
@pytest.mark.parametrize("mode", ["none", "token_truncate"])
def test_uncorrected_or_corrected_token_by_token_it_is_another_gradient(folder: Path, mode: str) -> None:
    config = settings(folder, sampling_correction=mode)
    policy = toy(config)
    assert standard_errors_off(estimated_gradients(policy, config), exact_gradient(policy)).max() > 4
