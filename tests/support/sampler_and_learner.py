"""Log-probabilities of the same tokens by the model as it samples and as it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from backend.config.config import parse
from backend.models.policy import Policy, load_policy
from backend.sampling.rollout import Sampler
from backend.sampling.sampler import Sampling
from backend.training.batch import pack
from backend.training.policy_forward import PolicyForward
from backend.types import Group, Problem
from tests.support.random_models import tiny_model

PROMPT = 12


def deep_policy(
    folder: Path,
    hidden: int,
    *,
    layers: int = 8,
    bits: int | None = None,
    noise: float = 0.08,
    seed: int = 1,
    **settings: Any,
) -> Policy:
    """Layers of Qwen3's shape with adapters of this noise, drawn by `seed`, on every projection."""
    own = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4, "intermediate_size": 3 * hidden}
    path = folder / f"{hidden}-{layers}-{bits}"
    if not path.exists():
        tiny_model(path, hidden=hidden, layers=layers, dtype="bfloat16", bits=bits, own=own)
    policy = load_policy(parse({"model": str(path), "data": "none", "num_layers": -1, "beta": 0} | settings))
    if bits is None:
        table = policy.model.model.embed_tokens  # pyright: ignore
        table.weight = (1.5 * table.weight).astype(table.weight.dtype)
    mx.random.seed(seed)
    policy.model.update(tree_map(lambda x: x + noise * mx.random.normal(x.shape), policy.model.trainable_parameters()))
    policy.model.eval()
    return policy


def sampled_groups(
    policy: Policy, tokens: int, prompts: int = 3, G: int = 2, sampling: Sampling | None = None
) -> list[Group]:
    """Completions of full length of random prompts, advantages 1 and −1 in turns."""
    draw = np.random.default_rng(0)
    problems = [Problem(i, "", [], draw.integers(60, 320, PROMPT).tolist(), "") for i in range(prompts)]
    policy.eos_ids = [-1]  # no id, so no completion ends early
    groups = Sampler(policy, tokens).sample(problems, G, sampling or Sampling(), 0, 0)
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
