"""The examples in resources/: tools and an environment that work unchanged in TRL."""

from __future__ import annotations

import json
from typing import Any

from backend.rewards.scoring import ToolRequest
from backend.tools.runner import ToolRunner
from backend.tools.toolbox import RunTools
from backend.types import ToolCall, ToolResult
from backend.utils.places import resources
from tests.support.cases import cases

CALCULATOR, SEARCH = resources() / "examples" / "calculator.py", resources() / "examples" / "search.py"
WORDLE = resources() / "examples" / "wordle.py"


def play(tools: ToolRunner, *calls: ToolCall, row: dict[str, Any] | None = None) -> list[ToolResult]:
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
    assert [schema["function"]["name"] for schema in tools.toolbox.environment_schemas[""]] == ["guess"]
    words = ("geese", "Crane", "toast", "crane")
    opening, *guesses = play(tools, *(ToolCall("guess", {"word": word}) for word in words), row={"answer": "crane"})
    assert opening.content.startswith("Guess the hidden word of 5 letters.")
    assert guesses[0].content == "----G 5 left." and guesses[1].content == "GGGGG Solved in 2."
    assert [guess.failed for guess in guesses] == [False, False, True, True]
    (reward,) = tools.toolbox.rewards()
    played = tools.environment(0)
    assert reward.about.name == "Wordle" and reward.call(environments=[played]) == [0.9]
