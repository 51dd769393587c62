"""Tools in the reward worker: what goes wrong in one is a result that the model reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.rewards.calls import wait_on
from backend.rewards.inputs import TrainerState
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import RewardSource
from backend.rewards.worker_process import RewardWorker
from backend.tools.scorer_tools import ScorerTools
from backend.tools.toolbox import RunTools
from backend.types import Completion, Group, Problem, ToolCall, ToolResult
from backend.utils.errors import UserError

HEAD = "import asyncio, ctypes, os, sys, time\n\n"
TOOLS = (
    HEAD
    + '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b

def fork() -> str:
    """Fork."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return "forked"

async def fork_later() -> str:
    """Fork on the event loop."""
    return fork()

def leave() -> None:
    """Exit."""
    sys.exit("bye")

def write() -> int:
    """Write a lot, and tell how often this ran."""
    for _ in range(8):
        print("spam" * 50_000, flush=True)
        time.sleep(0.05)
    with open("written", "a+") as file:
        file.write("x")
        return file.tell()
'''
)
GAME = (
    HEAD
    + '''
class Game:
    def reset(self, start: int, **row) -> str:
        self.total = start
        return f"It is {start}."

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: How much.
        """
        self.total += number
        return self.total

    def end(self) -> None:
        """End the process."""
        time.sleep(0.1)
        os._exit(3)

    def freeze(self) -> None:
        """Keep Python's lock."""
        ctypes.PyDLL(None).usleep(60_000_000)

    def get_reward(self) -> float:
        return self.total
'''
)


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
        scorer = Scorer(RewardSource([["r1_int"]], None, tmp_path, (file,)), process, 20.0)
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


def scores(scorer: Scorer, numbers: Sequence[int]) -> list[float | None]:
    completions = [Completion([1], [0.0], "", "eos", conversation=number) for number in numbers]
    functions = len(scorer.load()[0])
    answer = scorer.score([Group(Problem(0, "", [], [], ""), completions)], 0, [1.0] * functions, 5.0, TrainerState())
    return answer.scores[-1]


def test_calls_have_results_or_errors(tools, capfd: pytest.CaptureFixture[str]) -> None:
    _, host = tools()
    calls = [ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 1}), ToolCall("none", {})]
    (results,) = run(host, calls + [ToolCall(name, {}) for name in ("fork", "fork_later", "leave", "write")])
    assert [(each.content, each.failed) for each in results] == [
        ("3", False),
        (str({"error": "add() missing 1 required positional argument: 'b'"}), True),
        ("{'error': 'Tool none not found.'}", True),
        ("forked", False),
        ("forked", False),
        ("{'error': 'SystemExit: bye'}", True),
        ("1", False),  # the forks ran nothing more
    ]
    assert [schema["function"]["name"] for schema in host.schemas.of()] == [
        "add",
        "fork",
        "fork_later",
        "leave",
        "write",
    ]
    run(host, [])
    printed = capfd.readouterr().err
    assert len(printed) < 100_000 and "more bytes that reward functions printed are left out" in printed


def test_reset_without_network_says_so(tools) -> None:
    text = 'class Game:\n    def reset(self, **row):\n        raise PermissionError(13, "Permission denied")\n'
    with pytest.raises(UserError, match=r"Permission denied \(mine.py, line 3\) \(reward_network is off\)\.$"):
        tools(text, "Game")[1].begin([{}], wait_on)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("end", "ended the process it ran in (exit code 3)"),
        pytest.param("freeze", "kept Python's lock for more than 1 s (tool_timeout)", marks=pytest.mark.proof),
    ],
)
def test_a_call_that_takes_the_process_with_it_is_an_error_and_environments_are_rebuilt(
    tools, name: str, says: str
) -> None:
    scorer, host = tools(GAME, "Game", timeout_s=1.0)
    rows = [{"start": 10}, {"start": 20}, {"start": 30}]
    numbers = [number for number, _ in host.begin(rows, wait_on)]
    add = ToolCall("add", {"number": 1})
    go_on(host, numbers, [add, add], [add], [])
    first, second = go_on(host, numbers[:2], [add], [add, ToolCall(name, {})])
    assert [each.content for each in first] == ["13"]
    assert [each.content for each in second] == ["22", str({"error": f"{name} {says}"})]
    (note,) = host.new_notes()
    assert note.startswith(f"The tool {name} {says}. Its process was started again")
    assert scores(scorer, numbers) == [13, 22, 30]  # of a process that has begun anew for it
    scorer.host.stop()  # by another run
    assert go_on(host, numbers[2:], [add])[0][0].content == "31" and not host.new_notes()
