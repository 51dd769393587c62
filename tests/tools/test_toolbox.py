"""Tools and environments as files define them, written as for TRL."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from backend.config.config import parse, resolve_paths
from backend.rewards.allowed_code import code_files
from backend.tools.toolbox import Toolbox, run_tools
from backend.utils.errors import UserError

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
    def helper() -> None: ...

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
        raw = resolve_paths(tmp_path, {"model": "m", "data": "d", **settings})
        return run_tools(parse(raw)).open({}).toolbox

    return load


def names(schemas: list[dict[str, Any]]) -> list[str]:
    return [schema["function"]["name"] for schema in schemas]


def test_public_functions_of_a_file_are_tools(load) -> None:
    found = load(tools_file="mine.py").shared_schemas
    assert names(found) == ["price", "wait"]  # no reward function
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
    assert names(load(tools_file="mine.py", tools=["wait"]).shared_schemas) == ["wait"]
    method = load(FILE + "buy = shop.buy\n", tools_file="mine.py", tools=["buy"])
    assert names(method.shared_schemas) == ["buy"]


def test_public_methods_of_an_environment_are_tools(load) -> None:
    only = load(environment="mine.py::Shop")
    assert {name: names(schemas) for name, schemas in only.environment_schemas.items()} == {"": ["buy", "opens"]}
    both = {"shop": "mine.py::Shop", "again": "mine.py::Shop", "plain": "mine.py::Plain"}
    several = load(environment=both, tools_file="mine.py")
    assert names(several.environment_schemas["again"]) == ["buy", "opens"]
    assert several.environment_schemas["plain"] == [] and names(several.shared_schemas) == ["price", "wait"]
    (reward,) = several.rewards()  # one for each class
    assert reward.about.name == "Shop" and reward.about.line == FILE[: FILE.index("def get_reward")].count("\n") + 1


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
        ("class E: ...", {"environment": "mine.py::E"}, "environment", r"E needs a method reset\(self, \*\*row\)"),
        ("class E:\n    reset = 1", {"environment": "mine.py::E"}, "environment", "needs a method reset"),
        (
            "class E:\n    def __init__(self): 1 / 0",
            {"environment": "mine.py::E"},
            "environment",
            r"E\(\) raised ZeroDivisionError: division by zero \(mine.py, line 73\)",
        ),
        (
            "class E:\n    def reset(self): ...\n    def price(self): ...",
            {"environment": "mine.py::E"},
            "environment",
            "price is a function of the tools file and a method of E",
        ),
        (
            "class E:\n    def reset(self): ...\n    def go(self, to: str): ...",
            {"environment": "mine.py::E"},
            "environment",
            "The model cannot be told of E.go. .*no docstring",
        ),
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
