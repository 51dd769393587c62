"""The setting `mcp_servers`, and OpenEnv environments: their checks, and what starting a server runs."""

import hashlib
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from backend.utils.text import quote

LOOPBACK = ("127.0.0.1", "::1", "localhost")
OPENENV = "openenv:"


def is_here(url: str) -> bool:
    """True for a server on this machine."""
    return urlsplit(url).hostname in LOOPBACK


class ServerSettings(BaseModel, extra="forbid", strict=True):
    """A program that speaks MCP over its stdin and stdout, or the URL of a server on this machine."""

    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str = ""
    url: str = ""

    @property
    def starts(self) -> str:
        """The URL, or the command line with its variables and folder: all that decides what runs."""
        words = [*(f"{name}={value}" for name, value in self.env.items()), self.command, *self.args]
        return self.url or shlex.join(words) + (f" in {shlex.quote(self.cwd)}" if self.cwd else "")

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def server_fault(name: Any, about: Any) -> str:
    """What is wrong with one server of the setting; "" for nothing."""
    label = f"The MCP server {quote(str(name), 40)}"
    try:
        server = ServerSettings.model_validate(about if isinstance(about, Mapping) else {})
        parts = urlsplit(server.url)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"{label}: {quote(where, 40)}: {first['msg'][:1].lower()}{first['msg'][1:]}."
    except ValueError as error:
        return f"{label}: {quote(server.url, 60)} is not a URL: {error}."
    if bool(server.command) == bool(server.url):
        return f"{label} needs either command, with args, env and cwd if it takes them, or url."
    if server.url and parts.scheme not in ("http", "https"):
        return f"{label}: {quote(server.url, 60)} is not a URL such as http://127.0.0.1:8000/mcp."
    if server.url and not is_here(server.url):
        return (
            f"{label} is on {quote(parts.hostname or '', 60)}. Calls contain what the model wrote, which stays on this "
            f"machine: the host must be {', '.join(LOOPBACK[:-1])} or {LOOPBACK[-1]}."
        )
    return ""


def openenv_servers(environment: Any) -> dict[str, tuple[str, ServerSettings]]:
    """The OpenEnv environments of the raw setting, "" for the only one → name of its tool and reward, its server."""
    found: dict[str, tuple[str, ServerSettings]] = {}
    for name, entry in (environment if isinstance(environment, Mapping) else {"": environment}).items():
        if not str(entry).startswith(OPENENV):
            continue
        url, title = entry.removeprefix(OPENENV), name or "openenv"
        server = ServerSettings(url=url)
        if "://" not in url:
            folder = os.path.abspath(os.path.expanduser(url))
            python, title = os.path.join(folder, ".venv", "bin", "python"), name or os.path.basename(folder)
            program = [python, "-m"] if os.path.isfile(python) else ["uv", "run", "--project", folder]
            args = [*program[1:], "uvicorn", "server.app:app", "--host", "127.0.0.1"]
            server = ServerSettings(command=program[0], args=args, env={"MAX_CONCURRENT_ENVS": "1024"}, cwd=folder)
        found[name] = re.sub(r"\W", "_", str(title), flags=re.ASCII).strip("_"), server
    return found


def openenv_fault(environment: Any) -> str:
    """What is wrong with an OpenEnv environment of the setting; "" for nothing."""
    for _, server in openenv_servers(environment).values():
        if server.url and not re.fullmatch(r"ws://(127\.0\.0\.1|localhost)(:\d+)?(/.*)?", server.url):
            where = f"{quote(server.url, 60)} is not a server on this machine, such as ws://127.0.0.1:8000/ws"
            return f"{where}. Actions contain what the model wrote, which stays here."
        if server.cwd and not os.path.isfile(os.path.join(server.cwd, "server", "app.py")):
            return f"{quote(server.cwd, 90)} is not the folder of an OpenEnv environment: it has no server/app.py."
    return ""


def named_servers(settings: Mapping[str, Any]) -> dict[str, ServerSettings]:
    """The servers of raw settings by kind and name: of OpenEnv environments, and of MCP without a fault."""
    found, of_mcp = openenv_servers(settings.get("environment")).items(), settings.get("mcp_servers")
    servers = {f"OpenEnv server {name or title}": server for name, (title, server) in found}
    pairs = of_mcp.items() if isinstance(of_mcp, Mapping) else ()
    return servers | {
        f"MCP server {name}": ServerSettings(**each) for name, each in pairs if not server_fault(name, each)
    }


def with_absolute_paths(about: Any, folder: Path) -> Any:
    """A server with absolute paths of files and folders in `folder`; a command without a slash stays."""
    if server_fault("", about):
        return about
    server = ServerSettings(**about)

    def absolute(path: str) -> str:
        # Not realpath: .venv/bin/python is a link. A folder may have the name of a verb, as in `uv run`.
        return os.path.abspath(folder / path) if (folder / path).is_file() else path

    found: dict[str, Any] = {"args": [absolute(word) for word in server.args]}
    found["command"] = absolute(server.command) if "/" in server.command else server.command
    found["cwd"] = os.path.abspath(folder / server.cwd) if (folder / server.cwd).is_dir() else server.cwd
    return about | {key: value for key, value in found.items() if about.get(key)}
