"""Calls of tools, run in this process: order, time limits, errors and environments."""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from backend.config.config import parse, resolve_paths
from backend.rewards.allowed_code import code_files
from backend.rewards.calls import ThreadCaller, wait_on
from backend.rewards.resolve import RewardFunction
from backend.rewards.scorer import Scorer
from backend.rewards.scoring import FunctionHost, RewardSource, TrainerState
from backend.tools import toolbox
from backend.tools.load import ScorerTools, tool_names
from backend.tools.toolbox import RunTools, Toolbox, run_tools
from backend.types import Completion, Group, Problem, ToolCall, ToolResult, Turn
from backend.utils.errors import UserError
from tests.support.tool_calls import opened, results, scores

Call = ToolCall


class Counter:
    """Adds up."""

    made: int = 0
    closed: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.number = Counter.made
        Counter.made += 1

    def reset(self, start: int = 0, **row: Any) -> str:
        self.total, self.row = start, row
        return f"It is {start}.{row if 'n' in row else ''}"

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: How much.
        """
        time.sleep(0.02 if number == 1 else 0)
        self.total += number
        return self.total

    async def add_later(self, number: int) -> int:
        """Add later.

        Args:
            number: How much.
        """
        await asyncio.sleep(0.05)
        return self.add(number)

    def freeze(self, seconds: float) -> None:
        """Sleep where nothing interrupts.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)

    def which(self) -> int:
        """Tell the number of the instance."""
        return self.number

    def get_reward(self) -> float:
        return float(self.total)

    def close(self) -> None:
        Counter.closed.append(self.number)


class Judge:
    """Scores by a coroutine."""

    def reset(self, **row: Any) -> None: ...

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 9.0


@pytest.fixture(autouse=True)
def _new_counter() -> None:
    Counter.made, Counter.closed = 0, []


def hosted(tools: Sequence[Any] = (), environments: Mapping[str, Any] | None = None, timeout_s: float = 5.0) -> Any:
    """(scorer, its tools), in this process."""
    host = FunctionHost(ThreadCaller(), resolve=lambda *_: [])
    scorer = Scorer(RewardSource([[]], None, Path.cwd()), host, 5.0)
    functions = [documented(tool) for tool in tools]
    scorer.tools = RunTools(None, functions=functions, factories=environments or {})
    return scorer, ScorerTools(scorer, "environment" if len(environments or {}) > 1 else "", timeout_s)


def documented(tool: Any) -> Any:
    tool.__doc__ = tool.__doc__ or "Do it."
    return tool


def outcome(tool: Any, timeout_s: float = 5.0) -> ToolResult:
    """The result of one call of a function without arguments."""
    host = hosted([tool], timeout_s=timeout_s)[1]
    return results(host, {number: [Call(tool.__name__, {})] for number in opened(host, {})})[0][0]


def test_calls_of_a_turn_run_in_order_and_conversations_side_by_side() -> None:
    before, (_, host) = set(threading.enumerate()), hosted(environments={"": Counter})
    turn = [Call("add", {"number": 1}), Call("add_later", {"number": 10}), Call("add", {"number": 100})]
    start = time.perf_counter()
    found = results(host, dict.fromkeys(opened(host, *[{}] * 20), turn))
    assert time.perf_counter() - start < 20 * 0.07 / 2
    assert all([each.content for each in turn] == ["1", "11", "111"] for turn in found)
    new = set(threading.enumerate()) - before
    assert len([thread for thread in new if thread.name == "async tools"]) == 1


def test_instances_are_pooled_and_reset_with_the_row() -> None:
    scorer, host = hosted(environments={"": Counter})
    assert host.begin([{"start": 5, "environment": "x"}, {}], wait_on) == [(0, "It is 5."), (1, "It is 0.")]
    which = {number: [Call("which", {})] for number in (0, 1)}
    assert [each[0].content for each in results(host, which)] in (["0", "1"], ["1", "0"])
    results(host, {0: [Call("add", {"number": 2})]})
    assert scores(scorer, 0, 1, 0) == [[7.0, 0.0, 7.0]]
    assert opened(host, {}, {}, {}) == [2, 3, 4] and Counter.made == 3
    assert scores(scorer, 2, 3, 4) == [[0.0, 0.0, 0.0]]
    host.close()
    assert sorted(Counter.closed) == [0, 1, 2]


def test_a_mapping_of_environments_is_chosen_by_a_column_that_reset_does_not_get() -> None:
    scorer, host = hosted(environments={"count": Counter, "judge": Judge, "again": Counter})
    rows = [{"environment": name, "n": 1} for name in ("count", "judge", "again")]
    assert [text for _, text in host.begin(rows, wait_on)] == ["It is 0.{'n': 1}", None, "It is 0.{'n': 1}"]
    counted = results(host, {number: [Call("add", {"number": 3})] for number in (0, 1)})
    assert counted[0][0].content == "3" and counted[1][0].content == "{'error': 'Tool add not found.'}"
    assert [each.name for each in scorer.load()[0]] == ["Counter", "Judge"]
    assert scores(scorer, 0, 1, 2) == [[3.0, None, 0.0], [None, 9.0, None]]
    wrong = "environment='golf' in a row is not among the environments: count, judge, again"
    with pytest.raises(UserError, match=wrong):
        host.begin([{"environment": "golf"}], wait_on)


def test_errors_are_results_as_in_trl() -> None:
    def fails() -> None:
        raise KeyError("north")

    def leaves() -> None:
        raise SystemExit(2)

    async def fails_later() -> None:
        raise ValueError("late")

    async def cancels() -> None:
        raise asyncio.CancelledError

    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def odd() -> Odd:
        return Odd()

    def draws() -> list:
        return [{"type": "image", "image": b""}]

    expected = {
        fails: "'north'",
        leaves: "SystemExit: 2",
        fails_later: "late",
        cancels: "CancelledError: ",
        odd: "no text",
    }
    for tool, error in expected.items():
        tool.__annotations__ = {}
        assert outcome(tool).content == str({"error": error}) and outcome(tool).failed
    draws.__annotations__ = {}
    assert "images, which are not supported yet" in outcome(draws).content


def test_odd_results_are_cleaned_and_long_ones_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolbox, "LONGEST_RESULT", 60)

    def odd() -> str:
        return "\ud800a"

    def long() -> str:
        return "a" * 61

    assert outcome(odd).content == "?a" and not outcome(odd).failed
    assert outcome(long).content.startswith("{'error': 'long returned 61 characters; at most 60 are")
    assert outcome(long).failed


def test_a_call_that_takes_too_long_is_an_error_and_its_environment_is_not_used_again() -> None:
    def spins() -> None:
        while True:
            pass

    async def waits() -> None:
        await asyncio.sleep(60)

    for tool in (spins, waits):
        late = str({"error": f"{tool.__name__} was still running after 0.2 s (tool_timeout)"})
        assert outcome(tool, 0.2).content == late
    _, host = hosted(environments={"": Counter}, timeout_s=0.2)
    (number,) = opened(host, {})
    frozen = results(host, {number: [Call("freeze", {"seconds": 3.0}), Call("which", {})]})[0]
    assert "freeze was still running" in frozen[0].content and "has not ended" in frozen[1].content
    (number,) = opened(host, {})
    assert results(host, {number: [Call("which", {})]})[0][0].content == "1"


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([{"type": "text"}], "returned list, not text or None; images are not supported yet"),
        (7, "returned int, not text or None"),
        (ValueError("no such level"), "raised ValueError: no such level"),
    ],
)
def test_a_reset_that_fails_is_one_message(returned: Any, says: str) -> None:
    def reset(self: Any, **row: Any) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    _, host = hosted(environments={"": type("Game", (), {"reset": reset, "get_reward": reset})})
    with pytest.raises(UserError, match=f"The reset of an environment {says}"):
        host.begin([{}], wait_on)


def test_reward_functions_get_environments_and_messages_of_all_turns() -> None:
    seen = list[Any]()

    def reward(completions: Any, environments: Any) -> list[float]:
        seen.extend(completions)
        assert completions[0][0]["content"] == ""
        return [float(each.total) for each in environments]

    host = FunctionHost(ThreadCaller(), resolve=lambda *_: [RewardFunction.of("reward", reward, dialect="trl")])
    scorer = Scorer(RewardSource([["reward"]], None, Path.cwd()), host, 5.0)
    scorer.tools = RunTools(None, factories={"": Counter})
    (number,) = opened(ScorerTools(scorer, "", 5.0), {"start": 4})
    call, result = Call("add", {"number": 1}), ToolResult("add", "5")
    turns = [Turn("", [call], 3, [result], 2), Turn("Done.", tokens=2)]
    completion = Completion([1], [0.0], "Done.", "eos", turns=turns, conversation=number)
    scorer.score([Group(Problem(0, "", [], [], ""), [completion])], 0, [1.0, 1.0], TrainerState())
    assert completion.scores == {"reward": 4.0, "Counter": 4.0} and completion.reward == 8.0
    assert [message["role"] for message in seen[0]] == ["assistant", "tool", "assistant"]
    assert seen[0][1] == {"role": "tool", "name": "add", "content": "5"}


FILE = '''
import asyncio
from typing import Literal

_PRICES = {"tea": 3}

def price(item: str, currency: Literal["EUR", "USD"] = "EUR") -> int:
    """Look a price up.

    Args:
        item: What to buy.
        currency: Of the price.

    Returns:
        The price.
    """
    return _PRICES[item]

async def wait(seconds: float) -> None:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)

def score(completions, **kwargs):
    return [1.0 for _ in completions]

def _hidden(): ...

class Shop:
    made = 0

    def __init__(self) -> None:
        Shop.made += 1

    @property
    def stock(self) -> int:
        raise RuntimeError("a property is not evaluated")

    def reset(self, **row) -> str: ...

    def buy(self, item: str) -> str:
        """Buy.

        Args:
            item: What to buy.
        """
        return item

    @classmethod
    def opens(cls) -> str:
        """Tell when it opens."""
        return "at nine"

    @staticmethod
    def closes() -> str:
        """Tell when it closes."""
        return "at six"

    def close(self) -> None: ...

    def get_reward(self) -> float:
        return 1.0

    def _private(self) -> None: ...

class Plain:
    def reset(self, **row) -> None: ...

shop = Shop()
'''


@pytest.fixture
def load(tmp_path: Path):
    """Loads a run's tools from files in a folder."""

    def load(text: str = FILE, **settings: Any) -> Toolbox:
        (tmp_path / "mine.py").write_text(dedent(text))
        return run_tools(parse(resolve_paths(tmp_path, {"model": "m", "data": "d", **settings}))).open({})

    return load


def test_public_functions_of_a_file_are_tools(load) -> None:
    found = load(tools_file="mine.py").schemas.shared
    assert tool_names(found) == ["price", "wait"]  # no reward function
    assert found[0]["function"] == {
        "name": "price",
        "description": "Look a price up.",
        "parameters": {
            "type": "object",
            "properties": {
                "item": {"type": "string", "description": "What to buy."},
                "currency": {"type": "string", "enum": ["EUR", "USD"], "description": "Of the price."},
            },
            "required": ["item"],
        },
        "return": {"type": "integer", "description": "The price."},
    }
    assert tool_names(load(tools_file="mine.py", tools=["wait"]).schemas.shared) == ["wait"]
    assert tool_names(load(FILE + "buy = shop.buy\n", tools_file="mine.py", tools=["buy"]).schemas.shared) == ["buy"]


def test_public_methods_of_an_environment_are_tools(load) -> None:
    only = load(environment="mine.py::Shop")
    assert [*only.schemas.by_environment] == [""] and tool_names(only.schemas.of("")) == ["buy", "closes", "opens"]
    both = {"shop": "mine.py::Shop", "again": "mine.py::Shop", "plain": "mine.py::Plain"}
    several = load(environment=both, tools_file="mine.py")
    assert tool_names(several.schemas.by_environment["again"]) == ["buy", "closes", "opens"]
    assert several.schemas.by_environment["plain"] == [] and tool_names(several.schemas.shared) == ["price", "wait"]
    (reward,) = several.rewards()  # one for each class
    assert reward.about.name == "Shop" and reward.about.line == FILE[: FILE.index("def get_reward")].count("\n") + 1


E, SHORT = {"environment": "mine.py::E"}, "class E:\n    def reset(self): ...\n    def "
RAISED = r"E\(\) raised ZeroDivisionError: division by zero \(mine.py, line 75\)"


@pytest.mark.parametrize(
    ("addition", "settings", "setting", "says"),
    [
        ("def bare(a: int): ...", {}, "tools_file", "The model cannot be told of bare. .* it has no docstring"),
        ('def bare(a):\n    """Do.\n\n    Args:\n        a: It.\n    """', {}, "tools_file", "a .*type hint .*bare"),
        ('def bare(a: int):\n    """Do."""', {}, "tools_file", "no description for the argument 'a'"),
        ("", {"tools": ["prize"]}, "tools", "mine.py has no function prize; it has price, wait."),
        ("", {"tools": ["_PRICES"]}, "tools", "mine.py has no function _PRICES; it has price, wait."),
        ("alias = price", {"tools": ["price", "alias", "again"]}, "tools", "no function again"),
        ("other = price\ndef price(): ...", {"tools": ["price", "other"]}, "tools_file", "price. .*no docstring"),
        ("", {"tools_file": "none.py"}, "tools_file", "none.py"),
        ("def broken(:", {}, "tools_file", "mine.py has a syntax error"),
        ("1 / 0", {}, "tools_file", "cannot be loaded: ZeroDivisionError"),
        ("", {"environment": "mine.py::Stop"}, "environment", "no class Stop; its classes are Shop, Plain."),
        ("", {"environment": "mine.py"}, "environment", "An environment is file.py::Class, not"),
        ("", {"environment": "mine.py::_PRICES"}, "environment", "dict is not a class"),
        ("class E: ...", E, "environment", r"E needs a method reset\(self, \*\*row\)"),
        ("class E:\n    reset = 1", E, "environment", "needs a method reset"),
        ("class E:\n    def __init__(self): 1 / 0", E, "environment", RAISED),
        (f"{SHORT}price(self): ...", E, "environment", "price is a function of the tools file and a method of E"),
        (f"{SHORT}go(self, to: str): ...", E, "environment", "The model cannot be told of E.go. .*no docstring"),
    ],
)
def test_what_cannot_be_a_tool_is_one_message(
    load, addition: str, settings: dict[str, Any], setting: str, says: str
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load(f"{FILE}\n{addition}\n", **({"tools_file": "mine.py"} | settings))
    (fault,) = caught.value.faults
    assert fault.setting == setting and len(fault.sentence) < 300


def test_files_of_tools_are_code_that_a_user_allows(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text("")
    raw = {"tools_file": "a.py", "environment": {"b": "b.py::B", "c": "c.py::C"}}
    assert [path.name for path in code_files(raw, tmp_path)] == ["a.py", "b.py", "c.py"]
    assert resolve_paths(tmp_path, raw)["environment"] == {
        "b": f"{tmp_path.resolve()}/b.py::B",
        "c": f"{tmp_path.resolve()}/c.py::C",
    }
