"""The shipped reward function of sessions that an agent's own loop has recorded."""

from __future__ import annotations

from typing import Any

from backend.rewards.registry import Scores, Texts, Types, register_reward_function


@register_reward_function("session_reward", label="Session Reward")
def session_reward(
    prompts: Texts, completions: Texts, answer: Texts, types: Types = None, **columns: list[Any]
) -> Scores:
    """The reward that was posted for the recorded session.

    None for a session without one, and for completions that are sampled, as in evaluations. It never reads the text.
    """
    return columns.get("session_reward") or [None] * len(completions)
