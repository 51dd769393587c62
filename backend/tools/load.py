"""The tools and environments that a run's settings name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

from backend.config.config import Config, keys_used_by
from backend.rewards.allowed_code import AllowedCode, AllowedServers
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.rewards.scorer import Scorer, begin_scorer
from backend.tools.host import NO_TOOLS, Poll, ToolHost, ToolSchemas
from backend.tools.mcp_servers import McpServers
from backend.tools.mcp_settings import openenv_servers
from backend.tools.openenv import openenv_tools
from backend.tools.scorer_tools import ScorerTools, tool_names
from backend.types import ToolCall, ToolResult
from backend.utils.errors import UserError

_SLICE_S = 0.01  # seconds of waiting for one host while another has calls too


def uses_tools(config: Config) -> bool:
    return bool(config.tools_file or config.environment or config.mcp_servers)


def load_tools(config: Config, scorer: Scorer) -> ToolHost | None:
    """Load the tools of a run into the process of its reward functions, before anything else loads these, and start its
    servers, which closing the scorer ends. None for a run without tools. Raises UserError."""
    hosts, taken = list[ToolHost](), dict[str, str]()
    if config.tools_file or config.environment:
        from backend.tools.toolbox import run_tools  # imports transformers

        scorer.tools = scorer.tools or run_tools(config)
        column = config.environment_column if isinstance(config.environment, Mapping) else ""
        hosts.append(ScorerTools(scorer, column, config.tool_timeout))
        for schemas in (hosts[0].schemas.by_environment or {}).values():
            taken |= dict.fromkeys(tool_names(schemas), "an environment")
        taken |= dict.fromkeys(tool_names(hosts[0].schemas.shared), "the tools file")
        if served := openenv_servers(config.environment):
            if both := taken.keys() & {title for title, _ in served.values()}:
                raise UserError("environment", f"{both.pop()} is an OpenEnv environment and a tool; rename one.")
            taken |= {title: "an environment" for title, _ in served.values()}
            hosts.append(openenv_tools(served, config.environment, column, config.tool_timeout, scorer.closing))
    if config.mcp_servers:
        hosts.append(McpServers(config.mcp_servers, config.tool_timeout, taken))
        scorer.closing.callback(hosts[-1].close)
    return SeveralHosts(hosts) if len(hosts) > 1 else next(iter(hosts), None)


def shown_tools(config: Config) -> tuple[ToolSchemas, str]:
    """Tools that prompts show, read in a process that ends again, or none and the sentence of `begin_tools`."""
    with ExitStack() as stack:
        tools, why_not = begin_tools(config, stack)
        return tools.schemas if tools else NO_TOOLS, why_not


def begin_tools(config: Config, stack: ExitStack) -> tuple[ToolHost | None, str]:
    """The tools of a run in a process that `stack` ends, or none and a sentence that says why: they were never allowed
    to run here, or fail."""
    named = {key: getattr(config, key) for key in (*keys_used_by("tools"), "reward_network")}
    if not uses_tools(config):
        return None, ""
    if AllowedCode().missing(named) or AllowedServers().missing(named):
        return None, "The tools were never allowed to run on this machine, so prompts are without them here."
    update = {"reward_isolation": "process", "reward_functions": list(DEFAULT_REWARDS), "stages": []}
    scorer = begin_scorer(config.model_copy(update=update | {"reward_functions_file": ""}))
    stack.callback(scorer.close)
    try:
        return load_tools(config, scorer), ""
    except UserError as error:
        return None, error.faults[0].sentence


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
