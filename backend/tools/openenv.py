"""Environments of OpenEnv servers (https://github.com/meta-pytorch/OpenEnv), spoken to as JSON over WebSocket."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from typing import Any
from urllib.request import ProxyHandler, build_opener

from backend.runs.start_progress import tell
from backend.tools.host import ServedEnvironment
from backend.tools.mcp_settings import ServerSettings
from backend.tools.scorer_tools import ScorerTools, scorer_here
from backend.utils.child_process import POLL_S, StderrTail, module_command
from backend.utils.command import backend_environment
from backend.utils.errors import UserError
from backend.utils.text import quote

START_S = 60.0  # for a server to start: uv installs its packages first
_INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")


def openenv_tools(
    served: dict[str, tuple[str, ServerSettings]], names: Iterable[str], column: str, timeout_s: float, stack: ExitStack
) -> ScorerTools:
    """The `served` of all environments, in this process. `stack` ends servers and sessions. Raises UserError."""
    from backend.tools.toolbox import RunTools  # imports transformers

    if find_spec("websockets") is None:
        raise UserError("environment", "OpenEnv environments need a package: pip install 'grpo-studio[openenv]'.")
    tell(f"Starting OpenEnv servers: {quote(', '.join(title for title, _ in served.values()), 90)}")
    sessions = {name: _session_type(*each, timeout_s, stack) for name, each in served.items()}
    factories = dict.fromkeys(names if column else (), ServedEnvironment) | sessions
    scorer = scorer_here(RunTools(None, factories=factories), timeout_s)
    stack.callback(scorer.close)
    return ScorerTools(scorer, column, timeout_s)


def _session_type(title: str, server: ServerSettings, timeout_s: float, stack: ExitStack) -> type:
    """The class of an environment, whose server `stack` ends."""
    url, process = (server.url, None) if server.url else _start(server, stack)
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


def _start(server: ServerSettings, stack: ExitStack) -> tuple[str, Any]:
    """(URL, process) of a server at a free port of this machine."""
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
    return f"ws://127.0.0.1:{port}/ws", process
