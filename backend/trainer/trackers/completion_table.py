"""Completions as rows of a table, with the columns that TRL's table of completions has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from backend.runs.completion_rows import GroupRow
from backend.trainer.trackers.records import StepRecord

FIRST_COLUMNS = ("step", "prompt", "completion")
LAST_COLUMNS = ("advantage", "reward", "answer", "stop", "tokens")
"""TRL's `advantage`, and what it does not have."""


def reward_columns(groups: Iterable[GroupRow]) -> list[str]:
    """Names of the reward functions that scored these groups, in order."""
    names: dict[str, None] = {}
    for group in groups:
        for completion in group.get("completions") or ():
            names |= dict.fromkeys(map(str, _mapping(completion.get("rewards"))))
    return list(names)


def columns(rewards: Sequence[str]) -> list[str]:
    return [*FIRST_COLUMNS, *rewards, *LAST_COLUMNS]


def table(groups: Sequence[GroupRow]) -> tuple[list[str], list[list[Any]]]:
    """(the columns, a row for each completion) of the groups of one step."""
    rewards = reward_columns(groups)
    return columns(rewards), [row for group in groups for row in rows(group, rewards)]


def logged(record: StepRecord, package: Any) -> dict[str, Any]:
    """What a package logs of a record: every metric, and the completions as a `Table` of the package's own."""
    metrics: dict[str, Any] = record.metrics()
    if record.groups:
        names, lines = table(record.groups)
        metrics["completions"] = package.Table(columns=names, data=lines)
    return metrics


def rows(group: GroupRow, rewards: Sequence[str]) -> list[list[Any]]:
    """A row for each completion of a group, in the order of `columns`; what a damaged file lacks is None."""
    return [
        [
            group.get("step"), group.get("prompt"), completion.get("text"),
            *(_mapping(completion.get("rewards")).get(name) for name in rewards),
            completion.get("advantage"), completion.get("reward"), group.get("answer"), completion.get("stop"), completion.get("tokens"),
        ]
        for completion in group.get("completions") or ()
    ]  # fmt: skip


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
