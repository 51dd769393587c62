"""Reward functions: registration, catalogue, lookup by name, and calls in a confined process.

Public modules:

    scorer       a run's functions: load, score, map rows     bench, cases   scoring outside a run
    catalogue    names, labels and parameters from source     allowed_code   files allowed to run
    weights      weight schedules                             errors         RewardError
    registry     FunctionDescription                          inputs         TrainerState

Internal: `resolve` runs files and finds functions, `scoring` and `calls` call them in `worker` (parent:
`worker_process`, sandbox: `confinement/`). `functions/` has the shipped functions; `programs` runs
a completion's code. Nothing imports mlx. User files use `from backend.rewards import register_reward_function`.
"""

from backend.rewards.registry import (
    RewardCallable,
    get_reward_function,
    register_map_function,
    register_reward_function,
)

__all__ = ["RewardCallable", "get_reward_function", "register_map_function", "register_reward_function"]
