"""Tool calls in a turn's ids, and the ids between two turns."""

import json
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


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tool_calls.json").read_text(encoding="utf-8"))
"""Turns in the formats of published models, and the calls that TRL 1.16 with transformers 5.24 reads in them."""
ANY_FORMAT = (
    "{{ tools | tojson if tools else '' }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls else '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
THINK, CHANNEL = ["<think>", "</think>"], ["<|channel>", "<channel|>"]


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


def test_only_results_longer_than_any_tokens_exceed(tokenizer: Any) -> None:
    longest = max(map(len, tokenizer.get_vocab()))
    form, results = (
        TurnFormat(tokenizer, {}),
        [ToolResult("add", "a" * 2 * longest), ToolResult("find", " a" + " " * 99)],
    )
    assert form.exceeds(results, 2) and not form.exceeds(results, 3)


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
        (CHAT_TEMPLATE, "json_tools", "after a turn comes no token that ends it"),
        ("{{ raise_exception('No tools.') }}", "json_tools", "cannot render a call and its result: No tools"),
    ],
)
def test_fault_names_why_a_template_cannot_be_used(tmp_path: Path, template: str, parser: str, reason: str) -> None:
    fault = TurnFormat(tool_tokenizer(tmp_path, template, parser=parser), {}).fault
    assert fault.startswith("The model cannot use tools: ") and fault.endswith(f"{reason}.")


@pytest.mark.parametrize("parser", GOLDEN["formats"])
def test_calls_equal_trls(tmp_path: Path, parser: str) -> None:
    about = GOLDEN["formats"][parser]
    special = CHANNEL if parser == "gemma4" else THINK
    tokenizer = tool_tokenizer(tmp_path, ANY_FORMAT, parser=parser, special=special)
    form = TurnFormat(tokenizer, {"opening": about["opening"]})
    assert not form.fault
    for text, calls in about["turns"]:
        made = [[call.name, call.arguments] for call in form.parse(tokenizer.encode(text), GOLDEN["tools"])[1]]
        assert json.dumps(made) == json.dumps(calls), text  # as text, because True == 1 == 1.0


MINIMAX = '<invoke name="{}">\n<parameter name="{}">{}</parameter>\n<parameter name="{}">{}</parameter>\n</invoke>\n'
KIMI_K2 = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
ADDED, FOUND = '{"a": 1, "b": 2}', '{"text": "7", "most": "7"}'
FORMATS = {  # of the parsers that mlx-lm has besides: calls of one section, of their own, and without an end
    "minimax_m2": "<minimax:tool_call>\n"
    + MINIMAX.format("add", "a", 1, "b", 2)
    + MINIMAX.format("find", "text", 7, "most", 7)
    + "</minimax:tool_call>",
    "minicpm5": '<function name="add"><param name="a">1</param><param name="b">2</param></function>\n'
    '<function name="find"><param name="text"><![CDATA[7]]></param><param name="most">7</param></function>',
    "mistral": f"[TOOL_CALLS]add[ARGS]{ADDED}[TOOL_CALLS]find[ARGS]{FOUND}",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + KIMI_K2.format("add", ADDED)
    + KIMI_K2.format("find", FOUND)
    + "<|tool_calls_section_end|>",
}


@pytest.mark.parametrize("parser", FORMATS)
def test_calls_in_formats_that_trl_does_not_read(tmp_path: Path, parser: str) -> None:
    tokenizer = tool_tokenizer(tmp_path, ANY_FORMAT, parser=parser)
    form = TurnFormat(tokenizer, {})
    calls = [CALLS[0], ToolCall("find", {"text": "7", "most": 7})]
    assert form.parse(tokenizer.encode(f"So.\n{FORMATS[parser]}<|im_end|>"), SCHEMAS) == ("So.", calls)
    if tokenizer.tool_call_end:
        cut = FORMATS[parser][:-3]
        assert form.parse(tokenizer.encode(cut), SCHEMAS) == (cut, [])
