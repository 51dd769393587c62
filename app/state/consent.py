"""Consent to run the user's code and to contact machines."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.distributed.hosts_file import AllowedHosts, HostsToAllow
from backend.rewards.allowed_code import AllowedCode, AllowedServers, CodeFile, CodeToAllow, Rights
from backend.tools.mcp_settings import ServerSettings


class Consent:
    """What the user has allowed. The `ask…` show a request and return the answer, which is no without a window."""

    def __init__(self, file: Path) -> None:
        self.ask: Callable[[Sequence[CodeToAllow]], bool] = lambda _: False
        self.ask_hosts: Callable[[HostsToAllow], bool] = lambda _: False
        self.ask_servers: Callable[[Mapping[str, ServerSettings]], bool] = lambda _: False
        self.code, self.servers, self.hosts = AllowedCode(file), AllowedServers(file), AllowedHosts(file)

    def obtain(self, *every: Mapping[str, Any], base: Path | None = None) -> bool:
        """True if all user code and MCP servers of these raw settings may run, after one question about each."""
        missing = (each for settings in every for each in self.code.missing(settings, base))
        requests = {(each.code.path, each.rights): each for each in missing}
        if requests and not self.ask([*requests.values()]):
            return False
        self.code.allow(requests.values())
        servers = {name: server for settings in every for name, server in self.servers.missing(settings).items()}
        if servers and not self.ask_servers(servers):
            return False
        self.servers.allow(servers.values())
        return True

    def is_missing(self, settings: Mapping[str, Any]) -> bool:
        return bool(self.code.missing(settings) or self.servers.missing(settings))

    def allow(self, code: CodeFile, rights: Rights) -> None:
        self.code.allow([CodeToAllow(code, changed=False, rights=rights)])

    def obtain_hosts(self, name: str) -> bool:
        """True if the machines of this hosts file may be contacted, after at most one question."""
        asked = self.hosts.missing(name)
        if asked is not None:
            if not self.ask_hosts(asked):
                return False
            self.hosts.allow(asked)
        return True
