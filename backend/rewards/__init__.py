"""Reward functions: register them, resolve them by name, load a user's own file, score the completions of a step.

    functions/  shipped functions         runner/   call functions: inputs, limits, what they returned
    sandbox/    do so in a process of its own     scorer   a run's functions, wherever they are called
    programs/   run a completion's code against tests

It scores text, imports no mlx, and knows no model and no trainer. A user's file needs one line of it:
`from backend.rewards import register_reward_function`.
"""

# Importing these registers what ships with the program, in the order in which tables list it.
from backend.rewards.functions import r1 as r1  # isort: skip
from backend.rewards.functions import answers as answers  # isort: skip
from backend.rewards.functions import formats as formats  # isort: skip
from backend.rewards.functions import texts as texts  # isort: skip
from backend.rewards.functions import lengths as lengths  # isort: skip
from backend.rewards.functions import code as code  # isort: skip
from backend.rewards.functions import groups as groups  # isort: skip
from backend.rewards.registry import (
    RewardCallable,
    get_reward_function,
    register_map_function,
    register_reward_function,
)

__all__ = ["RewardCallable", "get_reward_function", "register_map_function", "register_reward_function"]
