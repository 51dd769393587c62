"""The nouns of a step: a Problem is sampled into a Group of Completions. Plain lists; no arrays, no mlx."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backend.spec.completions import Stop as Stop


@dataclass(slots=True)
class Problem:
    """One row of the dataset, ready to be sampled.

    `prompt` is the person's own text (for a list of messages, the last user message): what reward functions and
    tables show. `tokens` are the ids the model reads: `messages` rendered by the chat template, the generation
    prompt included. `row` keeps every column as it came.
    """

    index: int
    prompt: str
    messages: list[dict[str, Any]]
    tokens: list[int]
    answer: str
    type: str | None = None
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Completion:
    """One sampled answer: exactly the ids that were drawn, the end-of-sequence id included.

    `logps[t]` is log π(tokens[t] | prompt, tokens[<t]) in nats under the policy that sampled, taken after dividing the
    logits by the temperature and before top-p, top-k and min-p cut anything away. `text` is `tokens` decoded, without
    the end-of-sequence token. `log_kept[t]` is the log of the share of the policy's mass that top-p, top-k and min-p left
    at step t, so logps − log_kept is what each token was really drawn with; empty means 0 throughout. `scores` holds each reward function's number, None where it had no opinion.
    """

    tokens: list[int]
    logps: list[float]
    text: str
    stop: Stop
    log_kept: list[float] = field(default_factory=list)
    scores: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float = 0.0
    logged: dict[str, Any] = field(default_factory=dict)
    """What reward functions noted of this completion (TRL's `log_extra`)."""


@dataclass(slots=True)
class Group:
    """The G completions of one problem; advantages are relative to this group."""

    problem: Problem
    completions: list[Completion]
