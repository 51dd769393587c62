"""How a model writes tool calls and reads their results: mlx-lm's parsers, transformers' types, the chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from backend.data.problems import apply_chat_template, has_chat_template, tokenizer_lock
from backend.types import ToolCall, ToolResult
from backend.utils.text import reason_of

JSON_ONLY = {"start_anchor": "-", "fields": {"calls": {"content": "json"}}}
"""A response template of transformers that reads calls as JSON, to have their arguments typed by schema."""
CALL, RESULT = "tool_mark_a8f3e2b1", "tool_mark_c4f9a8e2"  # must appear where a template renders them


class TurnFormat:
    """Parses the turns of one tokenizer and renders results of tools between them. `fault`: a sentence that says why
    this tokenizer cannot be used with tools, or ""."""

    def __init__(self, tokenizer: Any, template_variables: Mapping[str, Any]) -> None:
        self._tokenizer, self._variables = tokenizer, template_variables
        self._eos_ids = {int(token) for token in tokenizer.eos_token_ids}
        self._opening = ""  # text that the template puts before a turn: the start of the reasoning, if any
        reason = self._prepare()
        self.fault = f"The model cannot use tools: {reason.rstrip('.')}." if reason else ""

    def _prepare(self) -> str:
        """Reason why this tokenizer cannot be used with tools, or ""."""
        tokenizer = self._tokenizer
        if not has_chat_template(tokenizer):
            return "it has no chat template"
        if not tokenizer.has_tool_calling:
            return "mlx-lm knows no parser for tool calls in the format of its chat template"
        function = {"name": CALL, "description": "", "parameters": {"type": "object", "properties": {}}}
        user, schema = {"role": "user", "content": "dummy"}, {"type": "function", "function": function}
        try:
            prompt = apply_chat_template([user], tokenizer, {**self._variables, "tools": [schema]})
            suffix = self._decode(self.suffix([ToolResult("dummy", RESULT)]))
        except Exception as error:  # of any kind: a template raises, divides by zero, adds text to a number
            return f"its chat template cannot render a call and its result: {reason_of(error)}."
        if CALL not in self._decode(prompt):
            return "its chat template does not show tools to the model"
        if RESULT not in suffix:
            return "its chat template leaves out the results of tools"
        start, end = re.escape(tokenizer.tool_call_start), re.escape(tokenizer.tool_call_end)
        call = rf"{start}(?P<call>.*?)(?:{end or f'(?={start})'}|\Z)"
        if tokenizer.has_thinking:
            thinks, stops = tokenizer.think_start, tokenizer.think_end
            self._opening = thinks if suffix.rfind(thinks) > suffix.rfind(stops) else ""
            call = rf"{re.escape(thinks)}.*?(?:{re.escape(stops)}|\Z)|{call}"
        self._pattern = re.compile(call, re.DOTALL)
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def parse(self, ids: Sequence[int], schemas: Sequence[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
        """(text outside the calls, calls) of a turn's ids, its end included. With a malformed call all is plain text:
        (whole text, []). Calls inside the reasoning are text. Arguments are typed by the tool's schema, as by TRL."""
        text = self._decode(ids[:-1] if ids and ids[-1] in self._eos_ids else ids)
        turn = self._opening + text
        found = [match for match in self._pattern.finditer(turn) if match["call"] is not None]
        if not found or not all(match[0].endswith(self._tokenizer.tool_call_end) for match in found):
            return text, []
        try:
            calls = self._typed([match["call"] for match in found], schemas)
        except Exception:  # mlx-lm's parsers raise anything at all for text that they cannot read
            return text, []
        ends = [len(self._opening), *(match.end() for match in found)]
        starts = [*(match.start() for match in found), len(turn)]
        return "".join(turn[end:start] for end, start in zip(ends, starts, strict=True)).strip(), calls

    def _typed(self, texts: Sequence[str], schemas: Sequence[dict[str, Any]]) -> list[ToolCall]:
        """Calls in texts between markers. Raises an error of any kind for a malformed one."""
        from transformers.utils.chat_parsing import parse_response

        # As TRL: values stay text, until the schema types them
        as_text: list[dict[str, Any]] = []
        for function in (schema["function"] for schema in schemas):
            names = function.get("parameters", {}).get("properties", {})
            parameters = {"properties": {name: {"type": "string"} for name in names}}
            as_text.append({"function": {"name": function["name"], "parameters": parameters}})
        parsed = [self._tokenizer.tool_parser(text, as_text) for text in texts]
        flat = [call for result in parsed for call in (result if isinstance(result, list) else [result])]
        functions = [{"name": call["name"], "arguments": call.get("arguments")} for call in flat]
        for function in functions:
            if function["arguments"] is None:  # templates leave out what is empty
                function["arguments"] = {}
        if not all(isinstance(each["name"], str) and isinstance(each["arguments"], dict) for each in functions):
            raise ValueError("a call has no name, or arguments that are not a mapping")
        wrapped = json.dumps([{"function": function} for function in functions])
        made = parse_response(wrapped, JSON_ONLY, prefix="", tools=list(schemas))["calls"]
        return [ToolCall(call["function"]["name"], call["function"]["arguments"]) for call in made]

    def exceeds(self, results: Sequence[ToolResult], most: int) -> bool:
        """True for results that are certainly longer than `most` tokens, found without tokenising them."""
        return sum(len(result.content.strip()) for result in results) > most * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def suffix(self, results: Sequence[ToolResult]) -> list[int]:
        """Ids after the end of a turn whose calls gave `results`, next generation prompt included. Raises ValueError,
        or an error of the template."""
        calls = [{"id": str(number), "function": {"name": result.name}} for number, result in enumerate(results)]
        answers = [
            {"role": "tool", "content": result.content, "tool_call_id": str(number)}
            for number, result in enumerate(results)
        ]
        return self.continuation({"tool_calls": calls}, answers)[1:]

    def continuation(self, turn: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids from the end token of the assistant's `turn`, through `messages`, to the end of the next generation
        prompt. The turn's text is not rendered; its calls name tool messages. Raises ValueError or a template error."""
        calls = {call["id"]: call["function"]["name"] for call in turn.get("tool_calls") or ()}
        ids_of = {call: f"{number:09}" for number, call in enumerate(calls)}  # nine characters, as Mistral demands
        # A tokenizer of few letters cannot write the mark; what the turn says is then the mark.
        mark = CALL if calls or CALL in self._decode(self._tokenizer.encode(CALL)) else turn["content"] or CALL
        function = {"arguments": {"dummy": CALL}}
        stand_ins = [
            {"id": ids_of[call], "type": "function", "function": {"name": name} | function}
            for call, name in calls.items()
        ]
        ended = {"role": "assistant"} | ({"content": "", "tool_calls": stand_ins} if calls else {"content": mark})
        chat: list[dict[str, Any]] = [{"role": "user", "content": "dummy"}, ended]
        for message in messages:
            call = message.get("tool_call_id")
            chat.append(
                {**message, "name": calls[call], "tool_call_id": ids_of[call]} if call in calls else {**message}
            )
        with tokenizer_lock:
            ids = apply_chat_template(chat, self._tokenizer, self._variables)
        for place, token in enumerate(ids):
            if token in self._eos_ids and mark in self._decode(ids[:place]):
                return ids[place:]
        raise ValueError("after a turn comes no token that ends it")
