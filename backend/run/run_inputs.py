"""The inputs that a run reads before its model: the dataset's rows and the reward functions.

Read once a process: `preflight` checks them and passes them on to `load_parts`. A reward file is a user's program;
running it a second time would repeat its side effects (a judge model loaded twice, a log file begun twice).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.data.rows import Splits, read_splits
from backend.rewards.resolve import RewardFunction, resolve
from backend.rewards.user_files import RewardFile
from backend.spec.config import Config
from backend.spec.rewards.catalog import locate_reward_file
from backend.spec.setting_groups import RewardSettings

StageFunctions = list[list[RewardFunction]]
"""The reward functions of each stage; one list for a run without stages."""


@dataclass(frozen=True, slots=True)
class RunInputs:
    splits: Splits
    reward_functions: StageFunctions


def read_inputs(config: Config) -> RunInputs:
    """Read the dataset and run the reward files. Raises Mistake for either."""
    return RunInputs(read_splits(config), resolve_stages(config))


def resolve_stages(config: RewardSettings) -> StageFunctions:
    """The reward functions of every stage; each reward file is executed once, however many stages name it.

    Raises Mistake for functions that cannot be used.
    """
    file = locate_reward_file(config.reward_functions_file) if config.reward_functions_file else None
    entries = [stage.get("reward_functions") or config.reward_functions for stage in config.stages]
    executed: dict[Path, RewardFile] = {}
    return [resolve(names, file, executed=executed) for names in entries or [config.reward_functions]]
