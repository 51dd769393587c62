"""Reward models: sequence classification with one label."""

from __future__ import annotations

from pathlib import Path

from backend.judges.model_reward import ModelReward
from backend.rewards.catalogue import RewardCall
from backend.utils.errors import UserError


def open_reward_model(call: RewardCall, base: Path) -> ModelReward:
    """Raises UserError for a model that is none."""
    raise UserError("reward_functions", "Reward models cannot be loaded yet.")
