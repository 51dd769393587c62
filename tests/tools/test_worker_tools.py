"""Tools in the reward worker: what goes wrong in one is a result that the model reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.rewards.calls import wait_on
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import RewardSource
from backend.rewards.worker_process import RewardWorker
from backend.tools.scorer_tools import ScorerTools
from backend.tools.toolbox import RunTools
from backend.types import ToolCall, ToolResult

TOOLS = '''
import asyncio, os, sys, time

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b

def leave() -> None:
    """End the process."""
    os._exit(3)
'''


@pytest.fixture(scope="module")
def process() -> Iterator[RewardWorker]:
    process = RewardWorker()
    yield process
    process.stop()


@pytest.fixture
def tools(process: RewardWorker, tmp_path: Path):
    """Makes the tools of a file with this text."""

    def make(text: str = TOOLS, *environments: str, timeout_s: float = 5.0) -> tuple[Scorer, ScorerTools]:
        file = tmp_path / "mine.py"
        file.write_text(text)
        named = {name if len(environments) > 1 else "": (file, name) for name in environments}
        scorer = Scorer(RewardSource([["r1_int"]], None, tmp_path, (file,)), process, timeout_s)
        scorer.tools = RunTools(None if environments else file, (), named)
        return scorer, ScorerTools(scorer, "environment" if len(environments) > 1 else "", timeout_s)

    return make


def run(
    host: ScorerTools, *turns: Sequence[ToolCall], rows: Sequence[Mapping[str, Any]] = ()
) -> list[list[ToolResult]]:
    """One turn of each conversation of a new rollout."""
    return go_on(host, [number for number, _ in host.begin(rows or [{}] * len(turns), wait_on)], *turns)


def go_on(host: ScorerTools, numbers: Sequence[int], *turns: Sequence[ToolCall]) -> list[list[ToolResult]]:
    for number, calls in zip(numbers, turns, strict=True):
        host.submit(number, calls, wait_on)
    results = dict[int, list[ToolResult]]()
    while len(results) < len(turns):
        results |= host.finished(0.05, wait_on)
    return [results[number] for number in numbers]


def test_calls_of_a_turn_have_results_or_errors(tools) -> None:
    _, host = tools()
    calls = [ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 1}), ToolCall("none", {})]
    (results,) = run(host, calls)
    missing = str({"error": "add() missing 1 required positional argument: 'b'"})
    contents = ["3", missing, "{'error': 'Tool none not found.'}"]
    assert [(each.content, each.failed) for each in results] == list(zip(contents, [False, True, True], strict=True))
    assert [schema["function"]["name"] for schema in host.schemas.of()] == ["add", "leave"]


def test_a_call_that_ends_the_process_is_an_error_and_the_others_run_again(tools) -> None:
    scorer, host = tools()
    add, leave = ToolCall("add", {"a": 1, "b": 2}), ToolCall("leave", {})
    first, second = run(host, [add, leave, add], [add])
    assert [each.content for each in first] == [
        "3",
        "{'error': 'leave ended the process it ran in (exit code 3)'}",
        "3",
    ]
    assert [each.content for each in second] == ["3"]
    (note,) = scorer.new_notes()
    assert note.startswith("A tool ended the process it ran in (exit code 3).")
