"""Tools that run where the reward functions run, which see the same environments."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.rewards.calls import ThreadCaller, wait_on
from backend.rewards.scorer import ProcessLostError, Scorer
from backend.rewards.scoring import FunctionHost, RewardSource
from backend.tools.host import Poll, ToolSchemas, environment_name
from backend.types import ToolCall, ToolResult
from backend.utils.errors import UserError

if TYPE_CHECKING:
    from backend.tools.toolbox import RunTools

_POLL_S = 0.05
_MOST_REBUILDS = 3  # in a row, in which the same calls end the process again


@dataclass(slots=True)
class _Conversation:
    """`past`: calls that have changed its environment, to repeat in a new process."""

    environment: str
    row: dict[str, Any]
    past: list[ToolCall] = field(default_factory=list[ToolCall])


class ScorerTools:
    """Tools and environments of a scorer's process, as a ToolHost. A process that a call ends, or whose lock it keeps,
    is replaced: each environment is reset again and repeats its calls. The calls that were running then run one at a
    time, and the one that ends the process again has an error as its result. `column` names the environment of each
    row, "" if there is only one."""

    def __init__(self, scorer: Scorer, column: str, timeout_s: float) -> None:
        self._scorer, self._column, self._timeout_s = scorer, column, timeout_s
        self._numbers = itertools.count()
        self._conversations: dict[int, _Conversation] = {}
        self._running: dict[int, Sequence[ToolCall]] = {}
        self._ended: list[tuple[int, list[ToolResult]]] = []
        self._rebuilds = 0
        self._notes: list[str] = []
        scorer.load()
        self._environments = scorer.loaded.environment_schemas
        self.schemas = ToolSchemas(scorer.loaded.shared_schemas, self._environments or None)
        scorer.restore_tools = self._restore

    def begin(self, rows: Sequence[Mapping[str, Any]], poll: Poll) -> list[tuple[int, str | None]]:
        self._running, self._ended = {}, []
        self._conversations = {
            next(self._numbers): _Conversation(
                environment_name(row, self._column, self._environments) if self._column else "",
                {name: value for name, value in row.items() if name != self._column},
            )
            for row in rows
        }
        try:
            self._scorer.load(poll)
            texts = self._reset(poll)
        except (ProcessLostError, UserError) as error:
            self._conversations = {}
            if isinstance(error, UserError):
                raise
            raise UserError("environment", f"An environment {error} while it was reset.") from None
        return [(number, texts.get(number)) for number in self._conversations]

    def submit(self, conversation: int, calls: Sequence[ToolCall], poll: Poll) -> None:
        if not self._running:  # else a process that has ended is noticed with the calls that ran in it
            self._scorer.load(poll)
        self._running[conversation] = list(calls)
        self._exchange(poll, submit={conversation: calls})

    def finished(self, wait_s: float, poll: Poll) -> list[tuple[int, list[ToolResult]]]:
        if self._running and not self._ended:
            self._exchange(poll, wait_s=wait_s)
        ended, self._ended = self._ended, []
        return ended

    def new_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        self._conversations, self._running = {}, {}
        if self._environments:
            with suppress(ProcessLostError):
                self._scorer.ask_tools(self._timeout_s, wait_on, close=True)

    def _exchange(self, poll: Poll, **request: Any) -> None:
        try:
            for number, results in self._scorer.ask_tools(self._timeout_s, poll, **request):
                self._remember(number, self._running.pop(number), results)
                self._ended.append((number, results))
        except ProcessLostError as lost:
            self._recover(str(lost), poll)

    def _remember(self, number: int, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """Calls that were cut off are not repeated."""
        past = self._conversations[number].past
        past += [call for call, each in zip(calls, results, strict=True) if each.seconds < self._timeout_s]

    def _recover(self, what: str, poll: Poll) -> None:
        blamed = list[str]()
        for number, calls in list(self._running.items()):
            results = list[ToolResult]()
            for call in calls:
                start = time.perf_counter()
                try:
                    self._scorer.load(poll)
                    results += self._run({number: [call]}, poll)[number]
                except ProcessLostError as lost:
                    seconds = max(time.perf_counter() - start, self._timeout_s)
                    results.append(ToolResult(call.name, str({"error": f"{call.name} {lost}"}), True, seconds))
                    blamed.append(call.name)
                self._remember(number, [call], results[-1:])
            del self._running[number]
            self._ended.append((number, results))
        self._notes.append(
            f"{f'The tool {blamed[0]}' if blamed else 'A tool'} {what}. Its process was started again: environments "
            "repeated their calls, and the calls that were running ran again, one at a time."
        )

    def _restore(self, poll: Poll) -> None:
        """Bring the environments of a new process to where those of the old one were. If that ends it too, the scorer
        loads another."""
        try:
            if self._conversations:
                self._reset(poll)
                own = [name for schemas in self._environments.values() for name in tool_names(schemas)]
                past = {n: [call for call in each.past if call.name in own] for n, each in self._conversations.items()}
                self._run({number: calls for number, calls in past.items() if calls}, poll)
            self._rebuilds = 0
        except ProcessLostError as lost:
            self._rebuilds += 1
            if self._rebuilds == _MOST_REBUILDS:
                what = f"A tool {lost} again and again when the environments repeated their calls."
                raise UserError("environment", what) from None

    def _reset(self, poll: Poll) -> dict[int, str | None]:
        conversations = self._conversations if self._environments else {}
        rows = [(number, each.environment, each.row) for number, each in conversations.items()]
        texts = dict[int, str | None]()
        for number, (result,) in self._run({number: () for number, _, _ in rows}, poll, begin=rows).items():
            if result.failed:
                what = self._scorer.with_network_hint(result.content)
                raise UserError("environment", f"The reset of an environment {what}.")
            texts[number] = result.content or None
        return texts

    def _run(self, turns: Mapping[int, Sequence[ToolCall]], poll: Poll, **request: Any) -> dict[int, list[ToolResult]]:
        """The results of these turns, waited for."""
        results = dict(self._scorer.ask_tools(self._timeout_s, poll, **(request or {"submit": turns})))
        while len(results) < len(turns):
            results |= self._scorer.ask_tools(self._timeout_s, poll, wait_s=_POLL_S)
        return results


def scorer_here(tools: RunTools, timeout_s: float) -> Scorer:
    """A scorer of this process that has only tools."""
    scorer = Scorer(RewardSource([], None, Path.cwd()), FunctionHost(ThreadCaller()), timeout_s)
    scorer.tools = tools
    return scorer


def tool_names(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    return [schema["function"]["name"] for schema in schemas]
