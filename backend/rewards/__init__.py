"""Reward functions: registered, read as text for menus, resolved by name, called in a confined process.

What the rest of the program imports:

    scorer       a run's functions: load, score, map rows         bench, cases   score outside a run, for the Rewards page
    catalogue    names, labels and parameters as text, light      allowed_code   which files a person has allowed to run
    weights      schedules of weights                             errors         RewardError, LoadError
    registry     FunctionDescription                              inputs         TrainerState

Inside: `resolve` and `user_files` make callables of names, `scoring` and `calls` call them, `worker_process` and
`worker` are the two ends of the process in which that happens, `confinement/` confines it, `functions/` has the
shipped functions, `program_runner` and `program` run a completion's code. It imports no mlx. A user's file needs one
line of it: `from backend.rewards import register_reward_function`.
"""

from backend.rewards.registry import (
    RewardCallable,
    get_reward_function,
    register_map_function,
    register_reward_function,
)

__all__ = ["RewardCallable", "get_reward_function", "register_map_function", "register_reward_function"]
