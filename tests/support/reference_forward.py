"""Random completions, and their log-probabilities by a plain forward pass without micro-batches or caches."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from backend.types import Completion, Group, Problem

P, G, LONGEST = 3, 4, 9  # problems of an optimizer batch, completions a problem, tokens of the longest completion
TEMPERATURE = 0.8
Row = tuple[list[int], Completion]


def rows_of(groups: list[Group]) -> list[Row]:
    return [(group.problem.tokens, completion) for group in groups for completion in group.completions]


def plain_scores(model: nn.Module, rows: list[Row], temperature: float = TEMPERATURE) -> tuple[mx.array, mx.array]:
    """Log-probabilities and entropies [B, T], from the whole vocabulary at every position of one padded batch."""
    longest = max(len(prompt) + len(completion.tokens) for prompt, completion in rows)
    padded_rows = [
        prompt + completion.tokens + [0] * (longest - len(prompt) - len(completion.tokens))
        for prompt, completion in rows
    ]
    logp_BLV = nn.log_softmax(model(mx.array(padded_rows)) / temperature, axis=-1)
    position_BT = [[min(len(prompt) - 1 + t, longest - 1) for t in range(LONGEST)] for prompt, _ in rows]
    logp_BTV = mx.take_along_axis(logp_BLV, mx.array(position_BT)[:, :, None], axis=1)
    ids_BT1 = mx.array(padded([completion.tokens for _, completion in rows]).astype(int))[:, :, None]
    return mx.take_along_axis(logp_BTV, ids_BT1, axis=2)[:, :, 0], -(mx.exp(logp_BTV) * logp_BTV).sum(axis=-1)


def padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.array([[*row, *[0.0] * (LONGEST - len(row))] for row in rows], np.float32)


def sampled_groups(model: nn.Module, problems: int = P, seed: int = 0) -> list[Group]:
    """Groups of completions of unequal lengths, as if sampled from something near the policy after a top-p filter."""
    rng = np.random.default_rng(seed)
    groups = []
    for i in range(problems):
        rewards = np.full(G, 0.5) if i % P == 1 else rng.normal(size=G)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        prompt = rng.integers(3, 320, rng.integers(1, 8)).tolist()
        lengths = rng.integers(1, LONGEST + 1, G).tolist()
        tokens = [rng.integers(3, 320, length).tolist() for length in lengths]
        stops: list[Any] = [["length", "eos", "eos"][n] for n in rng.integers(0, 3, G)]
        completions = [
            Completion(ids, [], "", stop, np.log(rng.uniform(0.4, 1, len(ids))).tolist(), advantage=float(a))
            for ids, stop, a in zip(tokens, stops, advantages, strict=True)
        ]
        groups.append(Group(Problem(i, "", [], prompt, ""), completions))
    logp_BT, _ = plain_scores(model, rows_of(groups))
    noise = rng.normal(0, 0.2, (len(rows_of(groups)), 1))
    for (_, completion), row in zip(rows_of(groups), np.array(logp_BT) + noise, strict=True):
        completion.logps = row[: len(completion.tokens)].tolist()
    return groups
