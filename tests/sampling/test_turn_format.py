"""Tool calls in a turn's ids, and the ids between two turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.sampling.turn_format import TurnFormat
from backend.types import ToolCall, ToolResult
from tests.support.random_models import CHAT_TEMPLATE
from tests.support.tool_tokenizers import schema, tool_tokenizer

SCHEMAS = [schema("add", a="integer", b="integer"), schema("find", text="string", most="integer", exact="boolean")]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "2"}}\n</tool_call>'
FIND = '<tool_call>\n{"name": "find", "arguments": {"text": "7", "most": "7", "exact": "true"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>'
CALLS = [ToolCall("add", {"a": 1, "b": 2}), ToolCall("find", {"text": "7", "most": 7, "exact": True})]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tool_tokenizer(tmp_path_factory.mktemp("qwen3"), special=["<think>", "</think>"])


@pytest.mark.parametrize(
    ("text", "outside", "calls"),
    [
        (f"Adding.\n{ADD}", "Adding.", CALLS[:1]),
        (f"{ADD}\n{FIND}", "", CALLS),
        ('<tool_call>{"name": "stop"}</tool_call>', "", [ToolCall("stop", {})]),
        ("  The answer is 3.\n", "  The answer is 3.\n", []),
        (f"{ADD}\n{BROKEN}", f"{ADD}\n{BROKEN}", []),
        ('<tool_call>{"arguments": {}}</tool_call>', ..., []),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', ..., []),
        ("<tool_call>7</tool_call>", ..., []),
        (ADD.removesuffix("</tool_call>"), ..., []),
        (f"<think>{ADD}", ..., []),
        (f"<think>I could {ADD}</think>\n{FIND}", f"<think>I could {ADD}</think>", CALLS[1:]),
    ],
)
def test_calls_of_a_turn(tokenizer: Any, text: str, outside: Any, calls: list[ToolCall]) -> None:
    form = TurnFormat(tokenizer, {})
    for end in ("", "<|im_end|>"):
        ids = tokenizer.encode(text + end)
        assert form.parse(ids, SCHEMAS) == (text if outside is ... else outside, calls)


def test_a_call_without_end_beside_one_with_an_end_is_malformed(tokenizer: Any) -> None:
    text = f"{ADD}\n{FIND.removesuffix('</tool_call>')}"
    assert TurnFormat(tokenizer, {}).parse(tokenizer.encode(text), SCHEMAS) == (text, [])


def test_suffix_continues_after_the_end_of_the_turn(tokenizer: Any) -> None:
    results = [ToolResult("add", "3"), ToolResult("find", '{"error": "<|im_end|>"}', failed=True)]
    answers = "".join(f"\n<tool_response>\n{result.content}\n</tool_response>" for result in results)
    after = f"\n<|im_start|>user{answers}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(TurnFormat(tokenizer, {}).suffix(results)) == after
    hushed = TurnFormat(tokenizer, {"enable_thinking": False})
    assert tokenizer.decode(hushed.suffix(results)) == f"{after}<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "parser", "reason"),
    [
        (CHAT_TEMPLATE, "", "mlx-lm knows no parser for tool calls in the format of its chat template"),
        (CHAT_TEMPLATE, "json_tools", "after a call comes no token that ends a turn"),
        ("{{ raise_exception('No tools.') }}", "json_tools", "cannot render a call and its result: No tools"),
    ],
)
def test_fault_names_why_a_template_cannot_be_used(tmp_path: Path, template: str, parser: str, reason: str) -> None:
    fault = TurnFormat(tool_tokenizer(tmp_path, template, parser=parser), {}).fault
    assert fault.startswith("The model cannot use tools: ") and fault.endswith(f"{reason}.")
