"""Reward functions: register, resolve by name, load a person's own file, score a step's completions.

This room scores text. It knows no model, no arrays and no trainer, and it imports no mlx.
A person's file needs one line of it: `from backend.rewards import register_reward_function`.
"""

# Importing these registers what ships with the program, in the order in which tables list it.
from backend.rewards.functions import r1 as r1  # isort: skip
from backend.rewards.functions import answers as answers  # isort: skip
from backend.rewards.functions import formats as formats  # isort: skip
from backend.rewards.functions import texts as texts  # isort: skip
from backend.rewards.functions import lengths as lengths  # isort: skip
from backend.rewards.registry import RewardCallable, get_reward_function, register_reward_function

__all__ = ["RewardCallable", "get_reward_function", "register_reward_function"]
