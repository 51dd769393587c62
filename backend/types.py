"""The data of one training step: a Problem is sampled into a Group of Completions. Plain lists; no arrays, no mlx."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backend.runs.completion_rows import Stop


@dataclass(slots=True)
class Problem:
    """One row of the dataset, tokenised and ready to be sampled."""

    index: int
    prompt: str
    """The user's own text (for a list of messages, the last user message): what reward functions and tables show."""
    messages: list[dict[str, Any]]
    tokens: list[int]
    """The ids the model reads: `messages` rendered by the chat template, generation prompt included."""
    answer: str
    type: str | None = None
    row: dict[str, Any] = field(default_factory=dict)
    """Every column of the dataset's row, unchanged."""


@dataclass(slots=True)
class Completion:
    """One sampled answer. Every per-token list is as long as `tokens`."""

    tokens: list[int]
    """The sampled ids, end-of-sequence included."""
    logps: list[float]
    """log π(tokens[t] | prompt, tokens[<t]) in nats under the policy that sampled, after dividing the logits by the
    temperature and before top-p, top-k and min-p filter anything. Not read where `mask` is 0."""
    text: str
    """`tokens` decoded, without the end-of-sequence token."""
    stop: Stop
    log_kept: list[float] = field(default_factory=list)
    """log of the share of the policy's probability mass that top-p, top-k and min-p left at each token, so that
    logps − log_kept is the log-probability each token was really sampled with. Empty: 0 throughout."""
    log_held: list[float] = field(default_factory=list)
    """log of the share of the policy's mass that the grammar allowed at each token, which `log_kept` includes. Empty:
    output was free."""
    mask: list[int] = field(default_factory=list)
    """1 where the policy produced the token and is trained on it, 0 where something else wrote it into the
    conversation, such as a tool's result. Empty: 1 throughout."""
    scores: dict[str, float | None] = field(default_factory=dict)
    """Each reward function's score, None where it has no opinion."""
    reward: float | None = None
    advantage: float = 0.0
    logged: dict[str, Any] = field(default_factory=dict)
    """Extra values that reward functions logged for this completion (TRL's `log_extra`)."""

    @property
    def trained_tokens(self) -> int:
        """How many tokens the policy produced and is trained on."""
        return sum(self.mask) if self.mask else len(self.tokens)


@dataclass(slots=True)
class Group:
    """The G completions of one problem; advantages are relative to this group."""

    problem: Problem
    completions: list[Completion]
