"""Reward functions: register them, resolve them by name, load a user's own file, score the completions of a step.

    functions/  shipped functions         runner/   call functions: inputs, limits, what they returned
    sandbox/    do so in a process of its own     scorer   a run's functions, wherever they are called
    programs/   run a completion's code against tests   catalogue/  read functions as text, for menus

It scores text, imports no mlx, and knows no model and no trainer. A user's file needs one line of it:
`from backend.rewards import register_reward_function`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backend.rewards.registry import (
        RewardCallable,
        get_reward_function,
        register_map_function,
        register_reward_function,
    )

__all__ = ["RewardCallable", "get_reward_function", "register_map_function", "register_reward_function"]


def __getattr__(name: str) -> Any:
    """The names of `__all__`, loaded when they are first used: the window reads the catalogue without any function."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("backend.rewards.functions")
    return getattr(import_module("backend.rewards.registry"), name)
