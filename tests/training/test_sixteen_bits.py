"""In 16 bits sampler and learner are one policy as far as the format allows, and the rest is measured and corrected."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from backend.config.config import parse
from backend.models.policy import Policy, load_policy
from backend.sampling import fused_model
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.training.algorithms import build_learner
from backend.training.batch import pack
from backend.training.grpo import Grpo
from backend.training.policy_forward import PolicyForward
from backend.types import Group, Problem
from tests.support.random_models import tiny_model

PROMPT = 12


def deep_policy(folder: Path, hidden: int, *, layers: int = 8, **settings: Any) -> Policy:
    """Layers of Qwen3's shape with noisy adapters on every projection."""
    own = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4, "intermediate_size": 3 * hidden}
    path = folder / f"{hidden}-{layers}"
    if not path.exists():
        tiny_model(path, hidden=hidden, layers=layers, dtype="bfloat16", own=own)
    policy = load_policy(parse({"model": str(path), "data": "none", "num_layers": -1, "beta": 0} | settings))
    table = policy.model.model.embed_tokens  # pyright: ignore
    table.weight = (1.5 * table.weight).astype(table.weight.dtype)
    mx.random.seed(1)
    policy.model.update(tree_map(lambda x: x + 0.08 * mx.random.normal(x.shape), policy.model.trainable_parameters()))
    policy.model.eval()
    return policy


def sampled_groups(policy: Policy, tokens: int, sampling: Sampling | None = None) -> list[Group]:
    """Completions of full length of random prompts, advantages 1 and −1 in turns."""
    draw = np.random.default_rng(0)
    problems = [Problem(i, "", [], draw.integers(60, 320, PROMPT).tolist(), "") for i in range(3)]
    policy.eos_ids = [-1]  # no id, so no completion ends early
    groups = Sampler(policy, tokens).sample(problems, 2, sampling or Sampling(), 0, 0)
    for group in groups:
        for g, completion in enumerate(group.completions):
            completion.advantage = 1.0 if g % 2 == 0 else -1.0
    return groups


def by_sampler(policy: Policy, groups: list[Group]) -> np.ndarray:
    """log π of the completions [N], one token at a time through the model that decodes."""
    fused = Sampler(policy, 1).fused
    fused.refresh()
    rows = [group.problem.tokens + c.tokens for group in groups for c in group.completions]
    tokens_BL, cache = mx.array(rows), make_prompt_cache(policy.model)
    logps: list[mx.array] = []
    feed = tokens_BL[:, :PROMPT]
    for t in range(PROMPT, tokens_BL.shape[1]):
        logits = fused.split_model.logits(fused.split_model.hidden(feed, cache)[:, -1]).astype(mx.float32)
        feed = tokens_BL[:, t : t + 1]
        logps.append((mx.take_along_axis(logits, feed, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True))[:, 0])
        mx.eval(logps[-1])
    fused.release()
    return np.array(mx.stack(logps, axis=1)).reshape(-1)


def by_learner(policy: Policy, groups: list[Group]) -> np.ndarray:
    """The same from the forward pass of training."""
    forward = PolicyForward(1.0, 64, 4096)
    micro_batches = forward.micro_batches(policy.split_model, pack(groups, pad_id=0))
    policy.model.eval()
    rows: dict[int, np.ndarray] = {}
    for part, logp_BT in zip(
        micro_batches, forward.logps_without_gradient(policy.split_model, micro_batches), strict=True
    ):
        index: Any = part.batch.row_B.tolist()
        rows |= dict(zip(index, np.array(logp_BT), strict=True))
    return np.concatenate([rows[row] for row in sorted(rows)])


pytestmark = pytest.mark.usefixtures("as_on_a_cpu")
"""Bounds are for the CPU's own choices: told it is a GPU, it leaves attention to mlx, which here rounds its scores."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def folded(members: Any, merge: bool) -> Literal["merge"]:
    return "merge"


def gap(sampled: np.ndarray, learnt: np.ndarray) -> float:
    return float(np.abs(sampled - learnt).mean())


def test_sampler_and_learner_agree_in_bfloat16(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folding the adapters into the weights, as is right in float32, gives 0.05 nats a token."""
    policy = deep_policy(folder, 64)
    groups = sampled_groups(policy, 8)
    learnt = by_learner(policy, groups)
    apart = gap(by_sampler(policy, groups), learnt)
    in_a_rollout = np.concatenate([c.logps for group in groups for c in group.completions])
    assert max(apart, gap(in_a_rollout, learnt)) < 0.015
    monkeypatch.setattr(fused_model, "_fusion", folded)
    assert gap(by_sampler(policy, groups), learnt) > max(0.025, 3 * apart)


def float_types(policy: Any) -> set[mx.Dtype]:
    arrays = dict(tree_flatten(policy.model.parameters()))
    return {x.dtype for name, x in arrays.items() if mx.issubdtype(x.dtype, mx.floating) and "lora_" not in name}


def test_full_fine_tuning_in_bfloat16_keeps_float32_masters(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    raw = {"model": str(model), "data": "none", "train_type": "full", "dtype": "bfloat16", "group_size": 2}
    config = parse(raw | {"learning_rate": 1e-5})
    policy = load_policy(config)
    came = dict(tree_flatten(mx.load(str(model / "model.safetensors"))))
    assert float_types(policy) == {mx.bfloat16} and policy.split_model.dtype == mx.bfloat16
    assert all(mx.array_equal(x, came[name]) for name, x in policy.trainable().items()), "masters begin unrounded"
    groups = sampled_groups(policy, 6, sampling=Sampling(0.8))
    learner = build_learner(policy, config, 1)
    moved: list[float] = []
    for _ in range(2):
        learner.learn(pack([*groups[:1]], pad_id=0))
        moved.append(float(mx.abs(policy.trainable()["model.norm.weight"] - came["model.norm.weight"]).max()))
    assert moved[0] == pytest.approx(1e-5, rel=0.1) and moved[1] > 1.5 * moved[0], "1 + 1e-5 is 1 in bfloat16"
    own = dict(tree_flatten(policy.model.parameters()))
    assert all(mx.array_equal(own[name], x.astype(mx.bfloat16)) for name, x in policy.trainable().items())
    saved = {name: mx.array(x) for name, x in policy.trainable().items()}
    again = load_policy(config)
    again.assign(saved)
    tokens = mx.array([[5, 70, 200, 9]])
    assert mx.array_equal(again.model(tokens), policy.model(tokens))  # pyright: ignore


@dataclass(frozen=True)
class Filtered:
    """One policy in float32 for several tests, and what it sampled with each `top_p`."""

    policy: Policy
    groups: dict[float, list[Group]]
    start: dict[str, mx.array]

    def learn(self, raw: dict[str, Any], top_p: float) -> dict[str, float]:
        """Metrics of a learner's step from the weights that sampled."""
        self.policy.assign(dict(self.start))
        config = parse({"model": "none", "data": "none", "group_size": 2, "temperature": 1.0, "top_p": top_p} | raw)
        return build_learner(self.policy, config, 1).learn(pack(self.groups[top_p], pad_id=0))


@pytest.fixture(scope="module")
def filtered(folder: Path) -> Filtered:
    policy = deep_policy(folder, 64, layers=2, dtype="float32", beta=0.1)  # with a reference
    groups = {top_p: sampled_groups(policy, 6, sampling=Sampling(1.0, top_p=top_p)) for top_p in (1.0, 0.8)}
    return Filtered(policy, groups, {name: mx.array(x) for name, x in policy.trainable().items()})


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_the_first_pass_corrects_as_a_pass_of_its_own(filtered: Filtered, monkeypatch: pytest.MonkeyPatch, mode: str):
    """Two updates of a rollout with top-p: the same weights and metrics, and one pass of the policy less."""
    raw = {"beta": 0, "batch_size": 3, "sampling_correction": mode, "num_iterations": 2}
    raw |= {"learning_rate": 1e-3, "optimizer": "sgd", "weight_decay": 0.0}
    passes, results = [], []
    without_gradient = PolicyForward.logps_without_gradient

    def counted(forward: PolicyForward, model: Any, *rest: Any) -> Any:
        if model is filtered.policy.split_model:  # not the reference
            passes.append(len(results))
        return without_gradient(forward, model, *rest)

    monkeypatch.setattr(PolicyForward, "logps_without_gradient", counted)
    for own_pass in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(Grpo, "_needs_old_pass", lambda self, own_pass=own_pass: own_pass)
            metrics = filtered.learn(raw, 0.8)
        results.append((metrics, {name: np.array(x) for name, x in filtered.policy.trainable().items()}))
    assert passes == [0]
    (expected, weights), (metrics, own) = results
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)
    assert metrics["sampling/importance_sampling_ratio/mean"] < 0.99
    assert all(np.allclose(own[name], x, atol=1e-6) for name, x in weights.items())
    assert not all(np.array_equal(own[name], x) for name, x in filtered.start.items())


def test_the_ratio_is_exactly_1_where_sampler_and_learner_are_one(folder: Path) -> None:
    """The learner's own log-probabilities in place of the sampler's: nothing is left to correct, in bfloat16 too."""
    policy = deep_policy(folder, 64, layers=2)
    groups = sampled_groups(policy, 6)
    own = by_learner(policy, groups).reshape(-1, 6).tolist()
    for completion, logps in zip((c for group in groups for c in group.completions), own, strict=True):
        completion.logps, completion.log_kept = logps, []
    config = parse({"model": "none", "data": "none", "beta": 0, "group_size": 2, "batch_size": 3, "temperature": 1.0})
    metrics = build_learner(policy, config, 1).learn(pack(groups, pad_id=0))
    assert metrics["sampling/importance_sampling_ratio/min"] == metrics["sampling/importance_sampling_ratio/max"] == 1
    assert metrics["sampling/logp_gap/max"] == 0
