"""The tools and environments that a run's settings name: in the process of the reward functions, of MCP servers, whose
sessions are on one event loop in a thread of the trainer's process, and of OpenEnv servers
(https://github.com/meta-pytorch/OpenEnv), spoken to as JSON over WebSocket."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from inspect import cleandoc
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.request import ProxyHandler, build_opener

from backend.config.config import Config, keys_used_by
from backend.models.tokenizers import import_mlx_lm
from backend.rewards.allowed_code import AllowedCode, AllowedServers
from backend.rewards.calls import ThreadCaller, wait_on
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.rewards.scorer import ProcessLostError, Scorer, begin_scorer
from backend.rewards.scoring import FunctionHost, RewardSource
from backend.runs.start_progress import tell
from backend.tools.host import NO_TOOLS, Poll, ServedEnvironment, ToolHost, ToolSchemas, environment_name
from backend.tools.mcp_settings import ServerSettings, openenv_servers
from backend.types import ToolCall, ToolResult
from backend.utils.child_process import POLL_S, StderrTail, module_command
from backend.utils.command import backend_environment, is_bundled
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from mcp import Client

    from backend.tools.toolbox import RunTools

T = TypeVar("T")

START_S = 60.0  # seconds for a server to answer: npx, uvx and uv fetch it first
_INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
_MOST_REBUILDS = 3  # in a row, in which the same calls end the process again
_SLICE_S = 0.01  # seconds of waiting for one host while another has calls too


def load_tools(config: Config, scorer: Scorer) -> ToolHost | None:
    """Load the tools of a run into the process of its reward functions, before anything else loads these, and start its
    servers, which closing the scorer ends. Raises UserError."""
    hosts, taken = list[ToolHost](), dict[str, str]()
    if config.tools_file or config.environment:
        import_mlx_lm()
        from backend.tools.toolbox import run_tools  # imports transformers

        scorer.tools = scorer.tools or run_tools(config)
        column = config.environment_column if isinstance(config.environment, Mapping) else ""
        hosts.append(ScorerTools(scorer, column, config.tool_timeout))
        for schemas in hosts[0].schemas.by_environment.values():
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
    """The tools of a run in a process that `stack` ends, or none and the reason: never allowed, or a failure."""
    named = {key: getattr(config, key) for key in (*keys_used_by("tools"), "reward_network")}
    if not config.uses_tools:
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


@dataclass(slots=True)
class _Conversation:
    """`past`: calls that have changed its environment, to repeat in a new process."""

    environment: str
    row: dict[str, Any]
    past: list[ToolCall] = field(default_factory=list[ToolCall])


class ScorerTools:
    """Tools and environments of a scorer's process. One that a call ends, or whose lock it keeps, is replaced: each
    environment is reset and repeats its calls, those that were running run one at a time, and the one that ends it
    again has an error as its result. `column` names the environment of each row."""

    def __init__(self, scorer: Scorer, column: str, timeout_s: float) -> None:
        self._scorer, self._column, self._timeout_s = scorer, column, timeout_s
        self._numbers = itertools.count()
        self._conversations: dict[int, _Conversation] = {}
        self._running: dict[int, Sequence[ToolCall]] = {}
        self._ended: list[tuple[int, list[ToolResult]]] = []
        self._rebuilds = 0
        self._notes: list[str] = []
        self._noted = set[str]()
        scorer.load()
        self.schemas = scorer.loaded.schemas
        self._environments = self.schemas.by_environment
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

    def _recover(self, what: str, poll: Poll) -> None:
        """Run the calls that were running again, one at a time, after the process has ended as `what` says."""
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
        whose = f"The tool {blamed[0]}" if blamed else "A tool"
        self._note(
            f"{whose} {what}. Its process was started again: environments repeated their calls, and the calls that "
            "were running ran again, one at a time. Later ends have no note."
        )

    def _remember(self, number: int, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """Calls that were cut off are not repeated."""
        past = self._conversations[number].past
        past += [call for call, each in zip(calls, results, strict=True) if each.seconds < self._timeout_s]

    def _note(self, sentence: str) -> None:
        """A message for the user, once."""
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._notes.append(sentence)

    def _restore(self, poll: Poll) -> None:
        """Bring the environments of a new process to where the old ones were."""
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
            results |= self._scorer.ask_tools(self._timeout_s, poll, wait_s=POLL_S)
        return results


def scorer_here(tools: RunTools, timeout_s: float) -> Scorer:
    """A scorer of this process that has only tools."""
    scorer = Scorer(RewardSource([], None, Path.cwd()), FunctionHost(ThreadCaller()), timeout_s)
    scorer.tools = tools
    return scorer


def tool_names(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    return [schema["function"]["name"] for schema in schemas]


class SeveralHosts:
    """Conversations have the numbers of the first host, which answers calls of unknown tools. Calls of a turn run in
    order, whichever host has the tool."""

    def __init__(self, hosts: Sequence[ToolHost]) -> None:
        self._hosts = hosts
        shared = [schema for host in hosts for schema in host.schemas.shared]
        every = [host.schemas.by_environment for host in hosts]
        self.schemas = ToolSchemas(shared, {name: own for each in every for name, own in each.items() if own})
        self._host_of = {
            name: index
            for index, host in enumerate(hosts)
            for schemas in (host.schemas.shared, *every[index].values())
            for name in tool_names(schemas)
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


class McpServers(ScorerTools):
    """Their tools, as async functions of this process. `taken`: names of other tools → where they are from."""

    def __init__(self, servers: Mapping[str, Any], timeout_s: float, taken: Mapping[str, str]) -> None:
        if find_spec("mcp") is None:
            missing = "MCP servers need a package that is not installed:"
            missing = "MCP servers are not part of this app. With the package," if is_bundled() else missing
            raise UserError("mcp_servers", f"{missing} pip install 'grpo-studio[mcp]'.")
        import_mlx_lm()
        from backend.tools.toolbox import RunTools  # imports transformers

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="MCP servers", daemon=True)
        self._thread.start()
        self._servers = [_Server(name, ServerSettings(**about), self._note) for name, about in servers.items()]
        try:
            tell(f"Starting MCP servers: {quote(', '.join(servers), 90)}")
            if faults := self._start(self._servers):
                raise UserError([ConfigProblem("mcp_servers", f"{fault}.") for fault in faults])
            places, tools = dict(taken), list[Callable[..., Any]]()
            for server in self._servers:
                for name in tool_names(server.schemas):
                    here = f"the MCP server {server.name}"
                    if name in places:
                        both = f"{places[name]} and {here}"
                        what = f"The tool {quote(name, 40)} is in {both}; leave one of them out."
                        raise UserError("mcp_servers", what)
                    places[name] = here
                tools += [self._tool(server, schema) for schema in server.schemas]
            super().__init__(scorer_here(RunTools(None, functions=tools), timeout_s), "", timeout_s)
        except BaseException:
            self.close()
            raise

    def begin(self, rows: Sequence[Mapping[str, Any]], poll: Poll) -> list[tuple[int, str | None]]:
        """Begin conversations, and start servers again that have ended since the last rollout."""
        for fault in self._start([server for server in self._servers if server.has_ended], poll):
            self._note(f"{fault}. It is not tried again: its calls fail for the rest of the run.")
        return super().begin(rows, poll)

    def close(self) -> None:
        if not self._loop.is_closed():
            wait([self._soon(server.stop()) for server in self._servers])
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _soon(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _start(self, servers: Sequence[_Server], poll: Poll = lambda: None) -> list[str]:
        """Start servers side by side. → why some could not be."""
        starting = [self._soon(server.start()) for server in servers]
        while wait(starting, POLL_S).not_done:
            poll()
        return [why for each in starting if (why := each.result())]

    def _tool(self, server: _Server, schema: dict[str, Any]) -> Callable[..., Any]:
        async def tool(**arguments: Any) -> str:
            return await asyncio.wrap_future(self._soon(server.call(tool.__name__, arguments)))

        tool.__name__ = schema["function"]["name"]
        setattr(tool, "json_schema", schema)  # noqa: B010 - see `toolbox`
        return tool


class _Server:
    """A server and its session, on the event loop."""

    def __init__(self, name: str, settings: ServerSettings, note: Callable[[str], None]) -> None:
        self.name, self._settings, self._note = name, settings, note
        self.schemas: list[dict[str, Any]] = []
        self.has_ended = False  # during a rollout: the next one starts it again
        self._is_noted = False
        self._client: Client | None = None
        self._life: asyncio.Task[None] | None = None
        self._stderr = StderrTail()

    async def start(self) -> str:
        """Start it and list its tools. → why that failed; "" if it did not."""
        await self.stop()
        self.has_ended = False
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._life = life = asyncio.create_task(self._live())
        await asyncio.wait((self._started, life), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if self._started.done():
            return ""
        why = f"it listed no tools within {START_S:g} s"
        if life.done():
            error = life.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            why = str(error).rstrip(".") or type(error).__name__
        await self.stop()
        return f"The MCP server {self.name} could not be started: {why}{await self._last_line()}"

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of the result. Raises ValueError and what `mcp` raises, for the model to read."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        client, ended = self._client, ValueError(f"The MCP server {self.name} has ended.")
        if client is None:
            raise ended
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            if self._client is client:  # the first of the calls that it took along
                self._client, self.has_ended = None, True
                if not self._is_noted:
                    self._is_noted, last_line = True, await self._last_line()
                    self._note(
                        f"The MCP server {self.name} ended{last_line}. Its calls fail until the next rollout, which "
                        "starts it again. Later ends have no note."
                    )
            raise ended from error
        texts: list[str] = []
        for part in result.content:
            text = part.text if part.type == "text" else getattr(getattr(part, "resource", None), "text", None)
            if text is None:
                raise ValueError(f"{name} returned content of type {part.type}, and the model reads only text.")
            texts.append(text)
        text = "\n".join(texts)
        if result.is_error:
            raise ValueError(text)
        return text

    async def stop(self) -> None:
        """End the session, and the process if we started it."""
        life, self._client, self._life = self._life, None, None
        if life is not None:
            self._end.set()
            if not self._started.done():
                life.cancel()
            await asyncio.gather(life, return_exceptions=True)  # that the server is gone has been told

    async def _live(self) -> None:
        """A session from beginning to end: anyio wants both in one task."""
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.stdio import get_default_environment
        from mcp.client.streamable_http import streamable_http_client

        settings = self._settings
        async with AsyncExitStack() as stack:
            if settings.url:
                from httpx2 import AsyncClient

                # Without the proxies that the environment names: the server is on this machine.
                http = await stack.enter_async_context(AsyncClient(trust_env=False, timeout=None))
                client = Client(streamable_http_client(settings.url, http_client=http))
                await stack.enter_async_context(client)
            else:
                program, *arguments = module_command("backend.rewards.confinement.guard")
                server = StdioServerParameters(
                    command=program,
                    args=[*arguments, settings.command, *settings.args],
                    env=backend_environment(get_default_environment() | settings.env),
                    cwd=Path.home() / Path(settings.cwd).expanduser(),
                )
                reading, writing = os.pipe()
                self._stderr = StderrTail(os.fdopen(reading, "rb", 0))
                with os.fdopen(writing, "w") as errors:  # open in the server alone, so that its end is the pipe's
                    client = await stack.enter_async_context(Client(stdio_client(server, errors)))
            self.schemas, cursor = [], None
            while cursor != "":
                page = await client.list_tools(cursor=cursor)
                for tool in page.tools:
                    description = cleandoc(tool.description or "")
                    function = {"name": tool.name, "description": description, "parameters": tool.input_schema}
                    self.schemas.append({"type": "function", "function": function})
                cursor = page.next_cursor or ""
            self._client = client
            self._started.set_result(None)
            await self._end.wait()

    async def _last_line(self) -> str:
        lines = (await asyncio.to_thread(self._stderr.text)).splitlines()
        return f"; the last line that it printed is: {quote(lines[-1], 120)}" if lines else ""


def openenv_tools(
    served: dict[str, tuple[str, ServerSettings]], names: Iterable[str], column: str, timeout_s: float, stack: ExitStack
) -> ScorerTools:
    """The `served` of all environments, in this process. `stack` ends servers and sessions. Raises UserError."""
    from backend.tools.toolbox import RunTools

    if find_spec("websockets") is None:
        raise UserError("environment", "OpenEnv environments need a package: pip install 'grpo-studio[openenv]'.")
    tell(f"Starting OpenEnv servers: {quote(', '.join(title for title, _ in served.values()), 90)}")
    sessions = {name: _session_type(*each, timeout_s, stack) for name, each in served.items()}
    factories = dict.fromkeys(names if column else (), ServedEnvironment) | sessions
    scorer = scorer_here(RunTools(None, factories=factories), timeout_s)
    stack.callback(scorer.close)
    return ScorerTools(scorer, column, timeout_s)


def _session_type(title: str, server: ServerSettings, timeout_s: float, stack: ExitStack) -> type:
    """The class of an environment. Its server is started at a free port of this machine, unless it has a URL."""
    url, process = server.url, None
    if not url:
        if not shutil.which(server.command):
            folder = f"{quote(server.cwd, 90)} has no .venv/bin/python, and uv is not installed"
            how = "Install uv, or run there: python3 -m venv .venv && .venv/bin/pip install -e ."
            raise UserError("environment", f"{folder}. {how}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        variables = {name: os.environ[name] for name in _INHERITED if name in os.environ} | server.env
        command = [*module_command("backend.rewards.confinement.guard"), server.command, *server.args, "--port", port]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=server.cwd, env=backend_environment(variables), **pipes)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        url = f"ws://127.0.0.1:{port}/ws"
    stderr, deadline = StderrTail(process and process.stderr), time.monotonic() + START_S
    opener, address = build_opener(ProxyHandler({})), f"http{url[2:].rpartition('/')[0]}/schema"
    while True:
        has_ended = process is None or process.poll() is not None
        try:
            with opener.open(address, timeout=5.0) as answer:
                action = json.load(answer)["action"]
            break
        except (OSError, ValueError) as error:
            if has_ended or time.monotonic() > deadline:
                last = stderr.text().splitlines()[-1:] if process and has_ended else []
                why = f"the last line that it printed is: {quote(last[0], 120)}" if last else str(error)
                what = f"The OpenEnv environment {title} does not answer at {quote(url, 60)}; {why}."
                raise UserError("environment", what) from None
            time.sleep(POLL_S)

    def step(self: OpenEnvSession, /, **fields: Any) -> str:
        return self._ask("step", fields)

    fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
    parameters = {key: action[key] for key in ("type", "required", "$defs") if key in action} | {"properties": fields}
    function = {"name": title, "description": action.get("description") or "Act.", "parameters": parameters}
    setattr(step, "json_schema", {"type": "function", "function": function})  # noqa: B010 - see `toolbox`
    return type(title, (OpenEnvSession,), {"_url": url, "_timeout_s": timeout_s, title: step})


class OpenEnvSession:
    """An environment, which is a session at a server. Its subclass has the one tool."""

    _url, _timeout_s, _step_reward = "", 0.0, 0.0
    _socket: Any = None

    def reset(self, **row: Any) -> str:
        from websockets.sync.client import connect

        self._socket = self._socket or connect(self._url, proxy=None, max_size=None)
        return self._ask("reset", row)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, kind: str, data: Any) -> str:
        """The observation as JSON text. Raises RuntimeError for an error of the server."""
        from websockets.exceptions import ConnectionClosed

        try:
            with suppress(ConnectionClosed):  # then the last answer says why, such as that there are too many sessions
                self._socket.send(json.dumps({"type": kind, "data": data}, default=str))
            answer = json.loads(self._socket.recv(self._timeout_s))
        except BaseException:  # its answer would be taken for that to the next call
            self.close()
            raise RuntimeError("the server has ended the session") from None
        about = answer["data"]
        if answer["type"] == "error":
            if kind == "reset":  # as when there are too many sessions
                self.close()
            details = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in about.get("errors", ()))
            raise RuntimeError("; ".join([about["message"], *details]))
        self._step_reward = float(about.get("reward") or 0.0)
        return json.dumps(about["observation"], ensure_ascii=False)
