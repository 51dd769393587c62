"""Finds the models among entries of `reward_functions`, and opens them. Imports no mlx before it opens one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from backend.judges.model_reward import ModelReward
from backend.rewards.catalogue import JUDGE, builtin_rewards, find_call, read_call, reward_faults, rewards_in_file
from backend.utils.errors import ConfigProblem, UserError


def model_entries(entries: Iterable[str], file: Path | None) -> frozenset[str]:
    """The entries that are models: reward models, and the judge where the user's `file` registers no other."""
    calls = {entry: find_call(entry) for entry in entries}
    models = {entry for entry, call in calls.items() if call and call.is_model}
    judges = {entry for entry, call in calls.items() if call and call.function == JUDGE and not call.file}
    if judges and file:
        with suppress(UserError):  # reported when the file is loaded
            judges = judges if JUDGE not in {entry.name for entry in rewards_in_file(file)} else set()
    return frozenset(models | judges)


_REWARD_MODEL, _JUDGE = "backend.judges.reward_model", "backend.judges.judge"
"""Imported where a model is opened: the window, which loads no engine, imports this module for its names."""


class LoadedModel(NamedTuple):
    """A model whose weights a run has in memory. `source`: folder or id; `quantization` as in the settings; `judges`:
    the mode of a judge, "" for a reward model."""

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
    problems, opened = list[ConfigProblem](), dict[str, ModelReward]()
    for entry in entries:
        call = read_call(entry)
        try:
            if faults := reward_faults([entry], builtin_rewards()):
                raise UserError(faults)
            if call.is_model:
                opened[entry] = import_module(_REWARD_MODEL).open_reward_model(call, base)
            else:
                opened[entry] = import_module(_JUDGE).open_judge(call)
        except UserError as error:
            problems += error.faults
    if problems:
        raise UserError(problems)
    return opened
