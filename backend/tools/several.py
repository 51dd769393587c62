"""Tools of several hosts as one: those of files, of OpenEnv environments and of MCP servers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

from backend.tools.host import Poll, ToolHost, ToolSchemas
from backend.types import ToolCall, ToolResult

_SLICE_S = 0.01  # seconds of waiting for one host while another has calls too


class SeveralHosts:
    """A `ToolHost` over others, each with environments of its own names. Conversations have the numbers of the first,
    which answers calls of unknown tools. Calls of a turn run in order, whichever host has the tool."""

    def __init__(self, hosts: Sequence[ToolHost]) -> None:
        self._hosts = hosts
        shared = [schema for host in hosts for schema in host.schemas.shared]
        every = [host.schemas.by_environment or {} for host in hosts]
        environments = {name: own for each in every for name, own in each.items() if own}
        self.schemas = ToolSchemas(shared, environments or None)
        self._host_of = {
            schema["function"]["name"]: index
            for index, host in enumerate(hosts)
            for schemas in (host.schemas.shared, *every[index].values())
            for schema in schemas
        }
        self._numbers: list[dict[int, int]] = []  # host → number of a conversation → its number there
        self._calls: dict[int, tuple[list[ToolCall], list[ToolResult]]] = {}  # those left, and results so far
        self._running: dict[int, int] = {}  # conversation → host

    def begin(self, rows: Sequence[Mapping[str, Any]], poll: Poll) -> list[tuple[int, str | None]]:
        begun = [host.begin(rows, poll) for host in self._hosts]
        own = [number for number, _ in begun[0]]
        self._numbers = [dict(zip(own, (number for number, _ in each), strict=True)) for each in begun]
        self._running.clear()
        texts = [next(filter(None, (text for _, text in each)), None) for each in zip(*begun, strict=True)]
        return list(zip(own, texts, strict=True))

    def submit(self, conversation: int, calls: Sequence[ToolCall], poll: Poll) -> None:
        self._calls[conversation] = [*calls], []
        self._submit_next(conversation, poll)

    def finished(self, wait_s: float, poll: Poll) -> list[tuple[int, list[ToolResult]]]:
        ended: list[tuple[int, list[ToolResult]]] = []
        deadline = time.monotonic() + wait_s
        while self._running:
            left = max(deadline - time.monotonic(), 0.0)
            busy = set(self._running.values())
            for index in busy:
                slice_s = left if len(busy) == 1 else min(left, _SLICE_S)
                numbers = {theirs: own for own, theirs in self._numbers[index].items()}
                for number, results in self._hosts[index].finished(slice_s, poll):
                    conversation = numbers[number]
                    del self._running[conversation]
                    waiting, so_far = self._calls[conversation]
                    so_far += results
                    if waiting:
                        self._submit_next(conversation, poll)
                    else:
                        ended.append((conversation, so_far))
            if ended or not left:
                break
        return ended

    def new_notes(self) -> list[str]:
        return [note for host in self._hosts for note in host.new_notes()]

    def close(self) -> None:
        with ExitStack() as stack:
            for host in self._hosts:
                stack.callback(host.close)

    def _submit_next(self, conversation: int, poll: Poll) -> None:
        """Submit the next calls, up to the first of another host."""
        waiting = self._calls[conversation][0]
        index = self._host_of.get(waiting[0].name, 0)
        calls = [*takewhile(lambda call: self._host_of.get(call.name, 0) == index, waiting)]
        del waiting[: len(calls)]
        self._running[conversation] = index
        self._hosts[index].submit(self._numbers[index][conversation], calls, poll)
