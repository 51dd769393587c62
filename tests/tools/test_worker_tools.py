"""Tools in the reward worker: what goes wrong in one is a result that the model reads."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.rewards.calls import wait_on
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import RewardSource, ToolRequest
from backend.rewards.worker import RewardWorker
from backend.tools.host import Poll, ToolSchemas
from backend.tools.load import ScorerTools, SeveralHosts, tool_names
from backend.tools.toolbox import RunTools, Toolbox
from backend.types import ToolCall, ToolResult
from backend.utils.errors import UserError
from backend.utils.places import resources
from tests.support.cases import cases
from tests.support.tool_calls import opened, results, scores

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
    return go_on(host, opened(host, *(rows or [{}] * len(turns))), *turns)


def go_on(host: ScorerTools, numbers: Sequence[int], *turns: Sequence[ToolCall]) -> list[list[ToolResult]]:
    return results(host, dict(zip(numbers, turns, strict=True)))


def test_calls_have_results_or_errors(tools, capfd: pytest.CaptureFixture[str]) -> None:
    _, host = tools()
    calls = [ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 1}), ToolCall("none", {})]
    (found,) = run(host, calls + [ToolCall(name, {}) for name in ("fork", "fork_later", "leave", "write")])
    assert [(each.content, each.failed) for each in found] == [
        ("3", False),
        (str({"error": "add() missing 1 required positional argument: 'b'"}), True),
        ("{'error': 'Tool none not found.'}", True),
        ("forked", False),
        ("forked", False),
        ("{'error': 'SystemExit: bye'}", True),
        ("1", False),  # the forks ran nothing more
    ]
    assert tool_names(host.schemas.of()) == ["add", "fork", "fork_later", "leave", "write"]
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
    numbers = opened(host, {"start": 10}, {"start": 20}, {"start": 30})
    add = ToolCall("add", {"number": 1})
    go_on(host, numbers, [add, add], [add], [])
    first, second = go_on(host, numbers[:2], [add], [add, ToolCall(name, {})])
    assert [each.content for each in first] == ["13"]
    assert [each.content for each in second] == ["22", str({"error": f"{name} {says}"})]
    (note,) = host.new_notes()
    assert note.startswith(f"The tool {name} {says}. Its process was started again")
    assert scores(scorer, *numbers)[-1] == [13, 22, 30]  # of a process that has begun anew for it
    scorer.host.stop()  # by another run
    assert go_on(host, numbers[2:], [add])[0][0].content == "31" and not host.new_notes()
    assert go_on(host, numbers[2:], [ToolCall(name, {})])[0][0].failed and not host.new_notes()  # told once


class FakeHost:
    """Ends one conversation at each question, the last one first."""

    def __init__(self, log: list[str], first: int, *names: str, text: str | None = None) -> None:
        self.log, self.first, self.text = log, first, text
        self.schemas = ToolSchemas([{"function": {"name": name}} for name in names], {"": []} if text else {})
        self.running: list[tuple[int, list[ToolResult]]] = []

    def begin(self, rows: Sequence[Mapping[str, Any]], poll: Poll) -> list[tuple[int, str | None]]:
        self.running = []
        return [(self.first + index, self.text) for index in range(len(rows))]

    def submit(self, conversation: int, calls: Sequence[ToolCall], poll: Poll) -> None:
        self.log.append(f"{conversation}: {' '.join(call.name for call in calls)}")
        self.running.append((conversation, [ToolResult(call.name, f"{self.first}") for call in calls]))

    def finished(self, wait_s: float, poll: Poll) -> list[tuple[int, list[ToolResult]]]:
        return [self.running.pop()] if self.running else []

    def new_notes(self) -> list[str]:
        return [f"note {self.first}"]

    def close(self) -> None:
        self.log.append("closed")


def test_calls_of_a_turn_run_in_order_at_the_hosts_that_have_them() -> None:
    log: list[str] = []
    host = SeveralHosts([FakeHost(log, 10, "a", "b", text="hello"), FakeHost(log, 20, "c")])
    assert tool_names(host.schemas.of("")) == ["a", "b", "c"]
    assert host.begin([{}, {}], wait_on) == [(10, "hello"), (11, "hello")]
    host.submit(10, [ToolCall(name, {}) for name in ("a", "c", "c", "unknown", "b")], wait_on)
    host.submit(11, [ToolCall("c", {})], wait_on)
    ended: dict[int, list[str]] = {}
    while len(ended) < 2:
        ended |= {number: [each.content for each in results] for number, results in host.finished(1.0, wait_on)}
    assert ended == {10: ["10", "20", "20", "10", "10"], 11: ["20"]}
    assert log == ["10: a", "21: c", "20: c c", "10: unknown b"] and host.finished(1.0, wait_on) == []
    assert host.new_notes() == ["note 10", "note 20"]
    host.submit(11, [ToolCall("a", {})], wait_on)
    host.begin([{}], wait_on)
    assert host.finished(1.0, wait_on) == [], "the rollout before was stopped"
    host.close()
    assert log[-2:] == ["closed", "closed"]


CALCULATOR, SEARCH = resources() / "examples" / "calculator.py", resources() / "examples" / "search.py"
WORDLE = resources() / "examples" / "wordle.py"


def play(tools: Toolbox, *calls: ToolCall, row: dict[str, Any] | None = None) -> list[ToolResult]:
    """The results of these calls in one conversation, that of the environment's reset first."""
    results = tools.run(ToolRequest(0, timeout_s=5.0, wait_s=5.0, begin=[(0, "", row)]))[0][1] if row else []
    return results + tools.run(ToolRequest(0, timeout_s=5.0, wait_s=5.0, submit={0: calls}))[0][1]


@cases(
    ("expression", "value"),
    [
        ("47*86", "4042"),
        (" (1 + 2) * 3 / 4", "2.25"),
        ("-7 // 2 + 2**10", "1020"),
        ("1/0", "{'error': 'division by zero'}"),
        ("9**9**9", "{'error': 'the power is too large'}"),
        ("2 +", "{'error': 'not an expression: 2 +'}"),
        ("__import__('os')", "{'error': 'only numbers, parentheses and + - * / // % ** are allowed'}"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    (result,) = play(RunTools(CALCULATOR).open({}), ToolCall("calculate", {"expression": expression}))
    assert result.content == value and result.failed == value.startswith("{")


def test_search_finds_the_passage_of_every_question() -> None:
    tools = RunTools(SEARCH).open({})
    for row in map(json.loads, SEARCH.with_suffix(".jsonl").read_text("utf-8").splitlines()):
        (result,) = play(tools, ToolCall("search", {"query": row["prompt"]}))
        answer: str = {"4": "four", "11": "eleven"}.get(row["answer"]) or row["answer"]
        assert answer.lower() in result.content.replace(",", "").lower(), row


def test_wordle_marks_each_letter_once_and_scores_a_game() -> None:
    tools = RunTools(None, (), {"": (WORDLE, "Wordle")}).open({})
    assert tool_names(tools.schemas.of()) == ["guess"]
    words = ("geese", "Crane", "toast", "crane")
    opening, *guesses = play(tools, *(ToolCall("guess", {"word": word}) for word in words), row={"answer": "crane"})
    assert opening.content.startswith("Guess the hidden word of 5 letters.")
    assert guesses[0].content == "----G 5 left." and guesses[1].content == "GGGGG Solved in 2."
    assert [guess.failed for guess in guesses] == [False, False, True, True]
    (reward,) = tools.rewards()
    assert reward.about.name == "Wordle" and reward.call(environments=[tools.environment(0)]) == [0.9]
