"""Tools of MCP servers. All sessions are on one event loop, in a thread of the trainer's process."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from backend.runs.start_progress import tell
from backend.tools.host import Poll, ToolSchemas
from backend.tools.mcp_settings import ServerSettings
from backend.tools.runner import LONGEST_RESULT
from backend.types import ToolCall, ToolResult
from backend.utils.child_process import POLL_S, StderrTail, module_command
from backend.utils.command import backend_environment, is_bundled
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import quote

if TYPE_CHECKING:
    from mcp import Client, Tool

T = TypeVar("T")

START_S = 60.0
"""Seconds for a server to list its tools: npx and uvx fetch it first."""


class McpServers:
    """A `ToolHost` without environments. `taken`: names of other tools → where they are from. Raises UserError on
    `mcp_servers` where one cannot be started or two tools have the same name."""

    def __init__(self, servers: Mapping[str, Any], timeout_s: float, taken: Mapping[str, str]) -> None:
        if find_spec("mcp") is None:
            missing = "MCP servers need a package that is not installed:"
            missing = "MCP servers are not part of this app. With the package," if is_bundled() else missing
            raise UserError("mcp_servers", f"{missing} pip install 'grpo-studio[mcp]'.")
        self._timeout_s, self._count, self._notes = timeout_s, 0, list[str]()
        self._open: dict[int, Future[None]] = {}  # conversation → its calls, until `finished` returns the results
        self._ended = queue.SimpleQueue[tuple[int, list[ToolResult]]]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="MCP servers", daemon=True)
        self._thread.start()
        self._servers = [_Server(name, ServerSettings(**about), self._notes.append) for name, about in servers.items()]
        try:
            tell(f"Starting MCP servers: {quote(', '.join(servers), 90)}")
            if faults := self._start(self._servers):
                raise UserError([ConfigProblem("mcp_servers", f"{fault}.") for fault in faults])
            self._owners = _owners(self._servers, taken)
        except BaseException:
            self.close()
            raise
        self.schemas = ToolSchemas([schema for server in self._servers for schema in server.schemas])

    def begin(self, rows: Sequence[Mapping[str, Any]], poll: Poll) -> list[tuple[int, str | None]]:
        """Begin conversations, and start servers again that have ended since the last rollout."""
        for running in self._open.values():
            running.cancel()
        self._open.clear()
        for fault in self._start([server for server in self._servers if server.has_ended], poll):
            self._notes.append(f"{fault}. It is not tried again: its calls fail for the rest of the run.")
        first, self._count = self._count, self._count + len(rows)
        return [(number, None) for number in range(first, self._count)]

    def submit(self, conversation: int, calls: Sequence[ToolCall], poll: Poll) -> None:
        self._open[conversation] = self._soon(self._run(conversation, calls))

    def finished(self, wait_s: float, poll: Poll) -> list[tuple[int, list[ToolResult]]]:
        ended: list[tuple[int, list[ToolResult]]] = []
        deadline = time.monotonic() + wait_s
        while self._open:
            poll()
            left = 0.0 if ended else max(deadline - time.monotonic(), 0.0)
            with suppress(queue.Empty):
                conversation, results = self._ended.get(timeout=min(left, POLL_S))
                if self._open.pop(conversation, None):  # else of a rollout that was stopped
                    ended.append((conversation, results))
                continue
            if not left:
                break
        return ended

    def new_notes(self) -> list[str]:
        notes = self._notes.copy()
        del self._notes[: len(notes)]
        return notes

    def close(self) -> None:
        if not self._loop.is_closed():
            self._soon(_all(server.stop() for server in self._servers)).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _soon(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _start(self, servers: Sequence[_Server], poll: Poll = lambda: None) -> list[str]:
        """Start servers side by side. → why some could not be."""
        starting = self._soon(_all(server.start() for server in servers))
        while not wait((starting,), POLL_S).done:
            poll()
        return list(filter(None, starting.result()))

    async def _run(self, conversation: int, calls: Sequence[ToolCall]) -> None:
        self._ended.put((conversation, [await self._call(call) for call in calls]))

    async def _call(self, call: ToolCall) -> ToolResult:
        import anyio

        start, text, error = time.perf_counter(), "", ""
        try:
            if call.name not in self._owners:
                raise ValueError(f"Tool {call.name} not found.")
            with anyio.fail_after(self._timeout_s):
                text = await self._owners[call.name].call(call)
        except TimeoutError:
            error = f"still running after {self._timeout_s:g} s (tool_timeout)"
        except Exception as raised:
            error = str(raised) or type(raised).__name__
        text = str({"error": error}) if error else text
        return ToolResult(call.name, text[:LONGEST_RESULT], bool(error), time.perf_counter() - start)


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
        self._started, self._end = asyncio.Event(), asyncio.Event()
        self._stderr = StderrTail()

    async def start(self) -> str:
        """Start it and list its tools. → why that failed; "" if it did not."""
        await self.stop()
        self.has_ended = False
        self._started, self._end = asyncio.Event(), asyncio.Event()
        self._life = life = asyncio.create_task(self._live())
        waiting = asyncio.create_task(self._started.wait())
        await asyncio.wait((waiting, life), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._started.is_set():
            return ""
        why = _reason(life.exception()) if life.done() else f"it listed no tools within {START_S:g} s"
        await self.stop()
        return f"The MCP server {self.name} could not be started: {why}{await self._last_line()}"

    async def call(self, call: ToolCall) -> str:
        """The text of the result. Raises ValueError and what `mcp` raises, for the model to read."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        client, ended = self._client, ValueError(f"The MCP server {self.name} has ended.")
        if client is None:
            raise ended
        try:
            result = await client.call_tool(call.name, call.arguments)
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
                raise ValueError(f"{call.name} returned content of type {part.type}, and the model reads only text.")
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
            if not self._started.is_set():
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
                program, *arguments = module_command("backend.tools.guarded_command")
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
            self._started.set()
            await self._end.wait()

    async def _last_line(self) -> str:
        lines = (await asyncio.to_thread(self._stderr.text)).splitlines()
        return f"; the last line that it printed is: {quote(lines[-1], 120)}" if lines else ""


def _schema(tool: Tool) -> dict[str, Any]:
    description = cleandoc(tool.description or "")
    function = {"name": tool.name, "description": description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _owners(servers: Sequence[_Server], taken: Mapping[str, str]) -> dict[str, _Server]:
    """Tool → its server."""
    owners, places = dict[str, _Server](), dict(taken)
    for server in servers:
        for name in (schema["function"]["name"] for schema in server.schemas):
            here = f"the MCP server {server.name}"
            if name in places:
                both = f"{places[name]} and {here}"
                raise UserError("mcp_servers", f"The tool {quote(name, 40)} is in {both}; leave one of them out.")
            places[name], owners[name] = here, server
    return owners


def _reason(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error).rstrip(".") or type(error).__name__
