"""Several hosts as one: calls of a turn run in order, whichever host has the tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backend.tools.host import Poll, ToolSchemas
from backend.tools.several import SeveralHosts
from backend.types import ToolCall, ToolResult


class FakeHost:
    """Ends one conversation at each question, the last one first."""

    def __init__(self, log: list[str], first: int, *names: str, text: str | None = None) -> None:
        self.log, self.first, self.text = log, first, text
        self.schemas = ToolSchemas([{"function": {"name": name}} for name in names], {"": []} if text else None)
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


def poll() -> None: ...


def test_calls_of_a_turn_run_in_order_at_the_hosts_that_have_them() -> None:
    log: list[str] = []
    host = SeveralHosts([FakeHost(log, 10, "a", "b", text="hello"), FakeHost(log, 20, "c")])
    assert [schema["function"]["name"] for schema in host.schemas.of("")] == ["a", "b", "c"]
    assert host.begin([{}, {}], poll) == [(10, "hello"), (11, "hello")]
    host.submit(10, [ToolCall(name, {}) for name in ("a", "c", "c", "unknown", "b")], poll)
    host.submit(11, [ToolCall("c", {})], poll)
    ended: dict[int, list[str]] = {}
    while len(ended) < 2:
        ended |= {number: [each.content for each in results] for number, results in host.finished(1.0, poll)}
    assert ended == {10: ["10", "20", "20", "10", "10"], 11: ["20"]}
    assert log == ["10: a", "21: c", "20: c c", "10: unknown b"] and host.finished(1.0, poll) == []
    assert host.new_notes() == ["note 10", "note 20"]
    host.submit(11, [ToolCall("a", {})], poll)
    host.begin([{}], poll)
    assert host.finished(1.0, poll) == [], "the rollout before was stopped"
    host.close()
    assert log[-2:] == ["closed", "closed"]
