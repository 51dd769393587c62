"""Reward functions: registration, catalogue, and calls in a confined process.

Nothing imports mlx. User files use `from backend.rewards import register_reward_function`."""

from backend.rewards.registry import (
    RewardCallable,
    get_reward_function,
    register_map_function,
    register_reward_function,
)

__all__ = ["RewardCallable", "get_reward_function", "register_map_function", "register_reward_function"]
