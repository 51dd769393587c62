"""Conversations of a tool host: their turns, and what reward functions give them."""

from collections.abc import Mapping, Sequence
from typing import Any

from backend.rewards.calls import wait_on
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import TrainerState
from backend.tools.host import ToolHost
from backend.types import Completion, Group, Problem, ToolCall, ToolResult


def opened(host: ToolHost, *rows: Mapping[str, Any]) -> list[int]:
    return [number for number, _ in host.begin(rows, wait_on)]


def results(host: ToolHost, turns: Mapping[int, Sequence[ToolCall]]) -> list[list[ToolResult]]:
    """The results of each conversation's turn."""
    for number, calls in turns.items():
        host.submit(number, calls, wait_on)
    found = dict[int, list[ToolResult]]()
    while len(found) < len(turns):
        found |= host.finished(0.05, wait_on)
    return [found[number] for number in turns]


def scores(scorer: Scorer, *numbers: int) -> list[list[float | None]]:
    """Of each function, for these conversations."""
    each = [Completion([1], [0.0], "", "eos", conversation=number) for number in numbers]
    groups, weights = [Group(Problem(0, "", [], [], ""), each)], [1.0] * len(scorer.load()[0])
    return scorer.score(groups, 0, weights, TrainerState()).scores
