"""The reward functions, their weights, and where they run."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from backend.config.setting import setting
from backend.config.settings.headings import COURSE, REWARD_LIMITS
from backend.rewards.catalogue.catalog import DEFAULT_REWARDS


class RewardFields(BaseModel):
    """The reward functions, their weights, and where they run: the fields of `backend.config.config.Config` about it."""

    # fmt: off
    reward_functions: list[str] = setting(list(DEFAULT_REWARDS), "generation", "Custom reward function names", "Names of the "
                                          "functions that score a completion, in order, separated by commas. Empty means the five defaults.",
                                          kind="rewards", used_by=("task", "row_view", "rewards", "scoring"), empty_is_default=True,
                                          known_as=("Default Reward Functions", "Reward functions", "Use All Defaults"))
    reward_weights: list[float] = setting([], "generation", "Reward weights", "One number a function. Empty means 1 for each.",
                                          kind="numbers", used_by=("task", "rewards", "scoring"))
    reward_functions_file: str = setting("", "generation", "Reward functions Python file", "A Python file (.py or .txt) that "
                                         "registers functions of your own.", kind="file", used_by=("task", "rewards", "scoring"),
                                         known_as=("Reward functions file",))
    reward_weight_schedule: str = setting(
        "constant", "generation", "Weight schedule", "Whether the weights change over the run.", advanced=True,
        choices=[("constant", "Constant", "The weights as they stand."),
                 ("linear", "Linear", "Along a line to the final weights."),
                 ("adaptive", "Adaptive", "A function that seldom succeeds gains weight, one that nearly always does loses some.")],
        used_by=("rewards",), group=COURSE,
    )
    reward_weights_final: list[float] = setting([], "generation", "Final weights", "The weights at the last step, one a function.",
                                                kind="numbers", advanced=True, when=("reward_weight_schedule", ("linear",)),
                                                used_by=("rewards",), group=COURSE)
    stages: list[dict[str, Any]] = setting([], "generation", "Stages", "Parts of the run, one after the other, each with its own "
                                           "iters and whatever else it needs: reward_functions, reward_weights, data and its columns, learning_rate, "
                                           "temperature, group_size, max_completion_length … Together they decide how long the run is.",
                                           kind="stages", advanced=True, group=COURSE)
    reward_timeout: float = setting(60.0, "generation", "Reward timeout", "A reward function that takes longer than this "
                                    "in one step stops the run.", gt=0, le=1_000_000, unit="s", advanced=True,
                                    used_by=("rewards", "scoring"), group=REWARD_LIMITS)
    reward_isolation: str = setting(
        "process", "generation", "Reward isolation", "Where reward functions run.", advanced=True,
        choices=[("process", "Own process", "In a process beside the trainer, without its files and environment: a function that hangs, "
                  "crashes or exits is told by one sentence, and the run is saved."),
                 ("thread", "In the trainer", "In the trainer's own process, for functions that need what it has in memory. One that crashes "
                  "or never returns takes the run with it.")],
        used_by=("rewards",), group=REWARD_LIMITS,
    )
    reward_network: bool = setting(False, "generation", "Reward network", "Reward functions may use the network, as one that asks a judge "
                                   "does. Needs Reward isolation by process; in the trainer nothing keeps them from it.", advanced=True,
                                   when=("reward_isolation", ("process",)), used_by=("rewards", "scoring"), group=REWARD_LIMITS)
    # fmt: on
