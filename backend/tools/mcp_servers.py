"""Tools of MCP servers. All sessions are on one event loop, in a thread of the trainer's process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from backend.runs.start_progress import tell
from backend.tools.host import Poll
from backend.tools.mcp_settings import ServerSettings
from backend.tools.scorer_tools import ScorerTools, scorer_here, tool_names
from backend.utils.child_process import POLL_S, StderrTail, module_command
from backend.utils.command import backend_environment, is_bundled
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from mcp import Client, Tool

T = TypeVar("T")

START_S = 60.0
"""Seconds for a server to list its tools: npx and uvx fetch it first."""


class McpServers(ScorerTools):
    """Their tools, as async functions of this process. `taken`: names of other tools → where they are from. Raises
    UserError on `mcp_servers` where one cannot be started or two tools have the same name."""

    def __init__(self, servers: Mapping[str, Any], timeout_s: float, taken: Mapping[str, str]) -> None:
        if find_spec("mcp") is None:
            missing = "MCP servers need a package that is not installed:"
            missing = "MCP servers are not part of this app. With the package," if is_bundled() else missing
            raise UserError("mcp_servers", f"{missing} pip install 'grpo-studio[mcp]'.")
        from backend.tools.toolbox import RunTools  # imports transformers

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="MCP servers", daemon=True)
        self._thread.start()
        self._servers = [_Server(name, ServerSettings(**about), self._note) for name, about in servers.items()]
        try:
            tell(f"Starting MCP servers: {quote(', '.join(servers), 90)}")
            if faults := self._start(self._servers):
                raise UserError([ConfigProblem("mcp_servers", f"{fault}.") for fault in faults])
            _refuse_equal_names(self._servers, taken)
            tools = [self._tool(server, schema) for server in self._servers for schema in server.schemas]
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
            self._soon(_all(server.stop() for server in self._servers)).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _note(self, sentence: str) -> None:
        self._notes.append(sentence)

    def _soon(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _start(self, servers: Sequence[_Server], poll: Poll = lambda: None) -> list[str]:
        """Start servers side by side. → why some could not be."""
        starting = self._soon(_all(server.start() for server in servers))
        while not wait((starting,), POLL_S).done:
            poll()
        return list(filter(None, starting.result()))

    def _tool(self, server: _Server, schema: dict[str, Any]) -> Callable[..., Any]:
        async def tool(**arguments: Any) -> str:
            return await asyncio.wrap_future(self._soon(server.call(tool.__name__, arguments)))

        tool.__name__ = schema["function"]["name"]
        setattr(tool, "json_schema", schema)  # noqa: B010 - see `toolbox`
        return tool


async def _all(works: Iterable[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*works)


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
        why = _reason(life.exception()) if life.done() else f"it listed no tools within {START_S:g} s"
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
            await asyncio.wait((life,))

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
                self.schemas += map(_schema, page.tools)
                cursor = page.next_cursor or ""
            self._client = client
            self._started.set_result(None)
            await self._end.wait()

    async def _last_line(self) -> str:
        lines = (await asyncio.to_thread(self._stderr.text)).splitlines()
        return f"; the last line that it printed is: {quote(lines[-1], 120)}" if lines else ""


def _schema(tool: Tool) -> dict[str, Any]:
    description = cleandoc(tool.description or "")
    function = {"name": tool.name, "description": description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _refuse_equal_names(servers: Sequence[_Server], taken: Mapping[str, str]) -> None:
    places = dict(taken)
    for server in servers:
        for name in tool_names(server.schemas):
            here = f"the MCP server {server.name}"
            if name in places:
                both = f"{places[name]} and {here}"
                raise UserError("mcp_servers", f"The tool {quote(name, 40)} is in {both}; leave one of them out.")
            places[name] = here


def _reason(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error).rstrip(".") or type(error).__name__
