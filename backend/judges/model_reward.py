"""Rewards that are models, in the trainer's process. Imports no mlx and no client of a server before it opens one: the
window and the worker's parent read these names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from backend.rewards.calls import Failure, RewardError
from backend.rewards.catalogue import JUDGE, builtin_rewards, find_call, read_call, reward_faults, rewards_in_file
from backend.types import Group
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from backend.judges.judge import Judge
    from backend.judges.reward_model import RewardModel

    ModelReward = Judge | RewardModel

# Imported where a model is opened: the window, which loads no engine, imports this module for its names.
_REWARD_MODEL, _JUDGE = "backend.judges.reward_model", "backend.judges.judge"

Block = tuple[Sequence[float], Sequence[float]]  # x and y of the same observations


class UnreachableJudgeError(RewardError):
    """A judge's server is gone, and the run should pause until it is back."""

    def __init__(self, name: str, why: str) -> None:
        sentence = f"The judge {quote(name, 40)} cannot score: {why}."
        super().__init__(Failure(why), ("reward_functions", sentence))


def model_entries(entries: Iterable[str], file: Path | None) -> frozenset[str]:
    """The entries that are models: reward models, and the judge where the user's `file` registers no other."""
    calls = {entry: find_call(entry) for entry in entries}
    models = {entry for entry, call in calls.items() if call and call.is_model}
    judges = {entry for entry, call in calls.items() if call and call.function == JUDGE and not call.file}
    if judges and file:
        with suppress(UserError):  # reported when the file is loaded
            judges = judges if JUDGE not in {entry.name for entry in rewards_in_file(file)} else set()
    return frozenset(models | judges)


class LoadedModel(NamedTuple):
    """A model in memory. `quantization` as in the settings; `judges`: the mode of a judge, "" for a reward model."""

    source: str
    quantization: str = "none"
    judges: str = ""


def loaded_models(entries: Iterable[str]) -> list[LoadedModel]:
    """The models of these entries that this process loads."""
    models = list[LoadedModel]()
    for call in filter(None, map(find_call, entries)):
        if call.is_model:
            models.append(LoadedModel(call.function, str(call.arguments.get("quantization") or "none")))
        elif call.function == JUDGE and not call.file and call.arguments.get("url") == "local":
            mode = str(call.arguments.get("mode", "group"))
            models.append(LoadedModel(str(call.arguments.get("model", "")), judges=mode))
    return list(dict.fromkeys(models))


def open_model_rewards(entries: Sequence[str], base: Path) -> dict[str, ModelReward]:
    """Models by entry; folders are relative to `base`. Raises UserError with every problem."""
    problems: list[ConfigProblem] = []
    opened: dict[str, ModelReward] = {}
    for entry in entries:
        call = read_call(entry)
        try:
            if faults := reward_faults([entry], builtin_rewards()):
                raise UserError(faults)
            if call.is_model:
                opened[entry] = import_module(_REWARD_MODEL).RewardModel(call, base)
            else:
                opened[entry] = import_module(_JUDGE).Judge(call)
        except UserError as error:
            problems += error.faults
    if problems:
        raise UserError(problems)
    return opened


def score_metrics(name: str, groups: Sequence[Group], scores: Sequence[float | None]) -> dict[str, float]:
    """For the health rules. `saturated`: the larger of the shares of 0 and of 1, where all scores lie between.
    `length_correlation`: of scores and tokens within groups, where both vary."""
    rest, blocks = iter(scores), list[Block]()
    for group in groups:
        scored = [(len(each.tokens), score) for each, score in zip(group.completions, rest, strict=False)]
        known = [(length, score) for length, score in scored if score is not None]
        blocks.append(([length for length, _ in known], [score for _, score in known]))
    given = [score for _, block in blocks for score in block]
    metrics: dict[str, float] = {}
    if given and min(given) >= 0 and max(given) <= 1:
        metrics[f"judge/{name}/saturated"] = max(given.count(0), given.count(1)) / len(given)
    if (value := correlation(blocks)) is not None:
        metrics[f"judge/{name}/length_correlation"] = value
    return metrics


def sums(block: Block) -> tuple[float, float, float]:
    """Σxy, Σx² and Σy² about the means."""
    x, y = ([value - fmean(values) for value in values] for values in block)
    return sum(map(math.prod, zip(x, y, strict=True))), sum(a * a for a in x), sum(b * b for b in y)


def correlation(blocks: Sequence[Block]) -> float | None:
    """Pearson's, within blocks; None where x or y does not vary."""
    of_blocks = [sums(block) for block in blocks if block[0]]
    xy, xx, yy = (sum(each[k] for each in of_blocks) for k in range(3))
    return xy / math.sqrt(xx * yy) if xx * yy else None
