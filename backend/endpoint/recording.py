"""Sessions of an endpoint: requests of one agent's loop, kept with the exact ids and log-probabilities to train on.
sessions.jsonl has a line for each answered request and each posted reward. A request that continues another has only
what it adds: `after` is the number of the request before, in its session."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.endpoint.sessions import FILE
from backend.runs.events import JsonLines, read_events
from backend.sampling.sampler import Sampling
from backend.sampling.turn_format import TurnFormat
from backend.types import Completion, content_text
from backend.utils import file_lock
from backend.utils.disk import writing
from backend.utils.errors import UserError
from backend.utils.text import quote, reason_of

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer: `prompt`, the ids that `model` has read, and what it wrote."""

    prompt: list[int]
    completion: Completion
    sampling: Sampling
    model: str


@dataclass(frozen=True, slots=True)
class Request:
    """A recorded request. `own`: the ids that it adds to those of `after`; `key`: of the chat, its answer included."""

    number: int
    after: Request | None
    own: array[int]
    reply: Message
    has_ended: bool
    key: int

    def ids(self) -> list[int]:
        """Everything that the model has read and written by the end of this request."""
        chain, request = list[Request](), self
        while request is not None:
            chain.append(request)
            request = request.after
        return [token for request in reversed(chain) for token in request.own]


class Recorder:
    """Writes the sessions of one endpoint, and continues those that are in the folder. `note` takes messages. Raises
    DiskError, and UserError for a folder that another endpoint records into."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = file_lock.try_hold(folder / "recording.lock")
        if self._lock is None:
            raise UserError("record", f"Another endpoint records into {quote(folder, 70)}; choose another folder.")
        self._note = note
        self._has_told = False
        self._lines = JsonLines(folder / FILE)
        self._sessions: dict[str, list[Request]] = {}
        self._by_key: dict[tuple[str, int], Request] = {}
        for line in read_events(folder / FILE):
            if "reply" in line:
                self._remember(line)

    def prompt(
        self,
        session: str,
        model: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        turns: TurnFormat,
        rendered: Callable[[], list[int]],
    ) -> list[int]:
        """The ids that the model reads for a request: where `messages` begin with a recorded request's messages and its
        answer, the recorded ids and those of the new messages; else `rendered()`, and a part of the session begins."""
        before, count = self._continued(session, model, messages, tools)
        if before is not None:
            try:
                added = turns.continuation(before.reply, [plain(message) for message in messages[count:]])
                return before.ids() + added[before.has_ended :]
            except Exception as error:  # of any kind: a template without ends of turns, or one that refuses messages
                if not self._has_told:
                    self._note(f"The chat template cannot continue a turn, so a part begins: {reason_of(error)}.")
                self._has_told = True
        return rendered()

    def add(
        self, session: str, messages: Sequence[Message], tools: Sequence[Message] | None, reply: Message, answer: Answer
    ) -> None:
        """Append a request. `reply`: the assistant's message as the client gets it. Raises DiskError."""
        before, count = self._continued(session, answer.model, messages, tools)
        known = before.ids() if before else []
        if answer.prompt[: len(known)] != known:
            before, count, known = None, 0, []
        completion, sampling = answer.completion, answer.sampling
        line = {
            "session": session,
            "after": before.number if before else None,
            "model": answer.model,
            "temperature": sampling.temperature,
            "penalised": bool(sampling.penalties),
            "tools": list(tools or ()),
            "messages": [plain(message) for message in messages[count:]],
            "reply": plain(reply),
            "prompt": answer.prompt[len(known) :],
            "completion": completion.tokens,
            "logps": completion.logps,
            "log_kept": completion.log_kept,
            "text": completion.text,
            "stop": completion.stop,
        }
        self._lines.append(line)
        self._remember(line)

    def reward(self, session: str, reward: float, group: str) -> None:
        """Append a session's reward; its last one counts. Raises DiskError."""
        self._lines.append({"session": session, "reward": reward, "group": group})

    def close(self) -> None:
        self._lines.close()
        assert self._lock is not None
        os.close(self._lock)

    def _remember(self, line: Mapping[str, Any]) -> None:
        requests = self._sessions.setdefault(line["session"], [])
        before = None if line["after"] is None else requests[line["after"]]
        start = before.key if before else _start(line["model"], line["tools"])
        key = _keys(start, [*line["messages"], line["reply"]])[-1]
        ids, has_ended = array("i", [*line["prompt"], *line["completion"]]), line["stop"] == "eos"
        requests.append(Request(len(requests), before, ids, line["reply"], has_ended, key))
        self._by_key[line["session"], key] = requests[-1]

    def _continued(
        self, session: str, model: str, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[Request | None, int]:
        """(the request that these messages continue, how many of them it has with its answer)."""
        keys = _keys(_start(model, tools), [plain(message) for message in messages[:-1]])
        found = ((self._by_key.get((session, key)), count) for count, key in reversed([*enumerate(keys, 1)]))
        return next((pair for pair in found if pair[0]), (None, 0))


def plain(message: Message) -> Message:
    """A message in one form, for clients send the same one back in several: text as content, arguments as mappings,
    nothing empty. A part that is not text leaves the content a list."""
    made = {key: value for key, value in message.items() if value and key in ("role", "name", "tool_call_id")}
    content = message.get("content") or ""
    is_text = isinstance(content, str) or all(part.get("type") == "text" for part in content)
    made["content"] = content_text(content) if is_text else content
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            with suppress(ValueError):  # what is no JSON stays as the client wrote it
                arguments = json.loads(arguments)
        function = {"name": call["function"]["name"], "arguments": arguments}
        made.setdefault("tool_calls", []).append({"id": call["id"], "type": "function", "function": function})
    return made


def _start(model: str, tools: Sequence[Message] | None) -> int:
    return hash((model, json.dumps(list(tools or ()), sort_keys=True)))


def _keys(start: int, messages: Sequence[Message]) -> list[int]:
    """A key of the chat up to each message. Of an answer, white space at its ends does not count: clients strip it."""
    keys = [start]
    for message in messages:
        is_stripped = message["role"] == "assistant" and isinstance(message["content"], str)
        same = {**message, "content": message["content"].strip()} if is_stripped else message
        keys.append(hash((keys[-1], json.dumps(same, sort_keys=True))))
    return keys[1:]
