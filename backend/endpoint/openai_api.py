"""OpenAI's chat and text completions: the fields of a request, and an answer's text in its parts."""

import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from backend.endpoint.engine import LONGEST
from backend.endpoint.models import ServedModel
from backend.engine.penalties import Penalties
from backend.runs.completion_rows import Stop
from backend.sampling.cached_sequence import SampledToken
from backend.sampling.grammar import Grammar
from backend.sampling.outputs import REPLACEMENT, TextStream
from backend.sampling.sampler import Sampling
from backend.types import Completion, ToolCall, content_text
from backend.utils.errors import UserError

MAX_TOKENS = 4096  # of an answer, where the request does not say
FINISH: dict[Stop, str] = {"eos": "stop", "string": "stop", "length": "length"}
Message = dict[str, Any]


class StreamOptions(BaseModel):
    include_usage: bool = False


class SamplingFields(BaseModel):
    """What both kinds of request have. Fields that are left out come from the model's run; unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    max_tokens: int | None = Field(default=None, ge=1, le=LONGEST)
    n: int = Field(default=1, ge=1, le=128)
    seed: int | None = None
    stop: str | list[str] | None = None
    return_token_ids: bool = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        words = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(word for word in words if word)

    def sampling(self, model: ServedModel) -> Sampling:
        of_run = Sampling.of(model.config.model_copy(update={"output_regex": "", "output_schema": ""}))
        given = self.model_dump(include={"temperature", "top_p", "top_k", "min_p"}, exclude_none=True)
        penalties = self.repetition_penalty or 1.0, self.presence_penalty or 0.0, self.frequency_penalty or 0.0
        return replace(of_run, **given, penalties=Penalties(*penalties))


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = None


class ChatRequest(SamplingFields):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=LONGEST)
    tools: list[Message] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    response_format: ResponseFormat = ResponseFormat()
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def sampling(self, model: ServedModel) -> Sampling:
        form = self.response_format
        schema = (form.json_schema or {}).get("schema") if form.type == "json_schema" else {"type": "object"}
        if not isinstance(schema, dict):
            raise UserError("response_format", "A response format json_schema needs its schema, an object.")
        grammar = None if form.type == "text" else Grammar("schema", json.dumps(schema))
        return replace(super().sampling(model), grammar=grammar)


class TextRequest(SamplingFields):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)


def chat_messages(request: ChatRequest, model: ServedModel) -> list[Message]:
    """The chat as templates take it, with the run's system message where it has none. Raises UserError."""
    messages: list[Message] = []
    for number, message in enumerate(request.messages):
        where, role, content = f"messages[{number}]", message.get("role"), message.get("content")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise UserError(where, "The role must be system, developer, user, assistant or tool.")
        if isinstance(content, list):
            parts = [part if isinstance(part, dict) else {} for part in content]
            if not all(part.get("type", "text") == "text" and isinstance(part.get("text"), str) for part in parts):
                raise UserError(where, "Only text parts are supported.")
            content = content_text(content)
        if not isinstance(content, str | None):
            raise UserError(where, "The content must be text.")
        kept = {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if key in message}
        messages.append({"role": "system" if role == "developer" else role, "content": content or "", **kept})
        try:
            for call in message.get("tool_calls") or ():
                arguments = call["function"].get("arguments") or "{}"
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                function = {"name": call["function"]["name"], "arguments": arguments}
                messages[-1].setdefault("tool_calls", []).append({"id": "", **call, "function": function})
        except (TypeError, KeyError, ValueError, AttributeError):
            raise UserError(where, "A tool call needs function.name, and function.arguments as JSON.") from None
    system = model.config.system_prompt
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


@dataclass(slots=True)
class AnswerText:
    """Splits an answer's text, as it arrives, into the fields of a message, `reasoning_content` among them. What
    follows the mark of a tool call is held back until the end, where calls are parsed. A stop string ends the answer
    and is not part of it."""

    model: ServedModel
    tools: Sequence[Message] = ()
    stop_strings: tuple[str, ...] = ()
    prompt: Sequence[int] = ()
    is_chat: bool = True
    tokens: list[SampledToken] = field(default_factory=list[SampledToken])
    stop: Stop | None = None
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    _part: str = "content"
    _held: str = ""
    _stream: TextStream = field(init=False)
    _marks: dict[str, str] = field(default_factory=dict[str, str])  # mark → part that follows it

    def __post_init__(self) -> None:
        tokenizer = self.model.policy.tokenizer
        self._stream = TextStream(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
        if not self.is_chat:
            return
        if tokenizer.has_thinking:
            self._marks = {tokenizer.think_start: "reasoning_content", tokenizer.think_end: "content"}
            tail = tokenizer.decode(list(self.prompt[-16:]), skip_special_tokens=False)
            if tail.rfind(tokenizer.think_start) > tail.rfind(tokenizer.think_end):
                self._part = "reasoning_content"
        if self.tools:
            self._marks[tokenizer.tool_call_start] = "tool_calls"

    def push(self, new: Sequence[SampledToken], stop: Stop | None) -> list[tuple[str, str]]:
        """(field, text) of each new piece. `stop`: why the last token ended the answer."""
        pieces: list[tuple[str, str]] = []
        for token in new:
            self.tokens.append(token)
            if token.token not in self.model.policy.eos_ids:
                pieces += self._split(self._stream.push(token.token))
            if self.stop is not None:
                break
        if stop is not None and self.stop is None:
            pieces += self._split(self._stream.rest())
            self.stop = self.stop or stop
            if self._part == "tool_calls":
                _, self.calls = self.model.turn_format.parse([token.token for token in self.tokens], self.tools)
                self._part, self._held = "content", "" if self.calls else self._held
            pieces += self._take(self._held)
        runs = groupby(pieces, key=lambda piece: piece[0])
        return [(part, "".join(text for _, text in run)) for part, run in runs]

    def _split(self, text: str) -> Iterator[tuple[str, str]]:
        self._held += text
        while self._part != "tool_calls":
            # Reasoning comes first; a mark of a call inside it is text.
            may_follow = {
                "content": True,
                "reasoning_content": not self.content.strip(),
                "tool_calls": self._part == "content",
            }
            marks = [*self.stop_strings]
            marks += [mark for mark, part in self._marks.items() if part != self._part and may_follow[part]]
            found = re.search("|".join(map(re.escape, marks)) or "(?!)", self._held)
            if found is None:
                end, longest = len(self._held), max(map(len, marks), default=1) - 1
                starts = range(max(end - longest, 0), end)  # a mark may begin there, and end in the next text
                start = next((at for at in starts if any(mark.startswith(self._held[at:]) for mark in marks)), end)
                text, self._held = self._held[:start], self._held[start:]
                yield from self._take(text)
                return
            before, mark, after = self._held[: found.start()], found[0], self._held[found.end() :]
            yield from self._take(before)
            if mark in self.stop_strings:
                self.stop, self._held = "string", ""
                return
            self._part, self._held = self._marks[mark], after
            if self._part == "tool_calls":  # shown as it is if it cannot be read
                self._held = mark + after

    def _take(self, text: str) -> Iterator[tuple[str, str]]:
        if self.reasoning and self._part == "content" and not self.content:
            text = text.lstrip("\n")
        if not text:
            return
        if self._part == "reasoning_content":
            self.reasoning += text
        else:
            self.content += text
        yield self._part, text

    def completion(self) -> Completion:
        tokens = self.tokens
        assert self.stop is not None
        ids, log_kept = [token.token for token in tokens], [token.log_kept for token in tokens]
        ended = ids[:-1] if self.stop == "eos" else ids
        text = self.model.policy.tokenizer.decode(ended, skip_special_tokens=False)
        return Completion(ids, [token.logp for token in tokens], text, self.stop, log_kept)

    def message(self) -> Message:
        made: Message = {"role": "assistant", "content": self.content if self.content or not self.calls else None}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.calls:
            made["tool_calls"] = []
        for call in self.calls:
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            made["tool_calls"].append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return made

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else FINISH[self.stop or "length"]


def chat_logprobs(tokens: Sequence[SampledToken], tokenizer: Any) -> Message:
    def about(token: int, logp: float) -> Message:
        text = tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": logp, "bytes": None if REPLACEMENT in text else list(text.encode())}

    return {
        "content": [
            about(each.token, each.logp) | {"top_logprobs": [about(*pair) for pair in each.likeliest]}
            for each in tokens
        ]
    }


def text_logprobs(tokens: Sequence[SampledToken], tokenizer: Any) -> Message:
    texts = [tokenizer.decode([each.token], skip_special_tokens=False) for each in tokens]
    offsets = [*accumulate(map(len, texts), initial=0)][:-1]
    best = [  # of several incomplete characters, the likeliest
        {tokenizer.decode([token], skip_special_tokens=False): logp for token, logp in reversed(each.likeliest)}
        for each in tokens
    ]
    logps = [each.logp for each in tokens]
    return {"tokens": texts, "token_logprobs": logps, "top_logprobs": best, "text_offset": offsets}


def head(kind: str, model: str) -> Message:
    """The first fields of a response."""
    name = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
