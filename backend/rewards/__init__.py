"""Reward functions: register them, resolve them by name, load a user's own file, score the completions of a step.

    functions/  shipped functions         runner/   call functions: inputs, limits, what they returned
    sandbox/    do so in a process of its own     scorer   a run's functions, wherever they are called
    programs/   run a completion's code against tests   catalogue/  read functions as text, for menus

It scores text, imports no mlx, and knows no model and no trainer. A user's file needs one line of it:
`from backend.rewards import register_reward_function`.
"""

from backend.rewards.registry import (
    RewardCallable,
    get_reward_function,
    register_map_function,
    register_reward_function,
)

__all__ = ["RewardCallable", "get_reward_function", "register_map_function", "register_reward_function"]
