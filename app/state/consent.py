"""Consent to run the user's code and to contact machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.distributed.hosts_file import AllowedHosts, HostsToAllow
from backend.rewards.allowed_code import AllowedCode, CodeFile, CodeToAllow, Rights

Ask = Callable[[Sequence[CodeToAllow]], bool]
AskHosts = Callable[[HostsToAllow], bool]


def refuse_all(_request: object) -> bool:
    """The answer without a window, when there is no user to ask."""
    return False


class Consent:
    """What the user has allowed: `code` and `hosts`. `ask` and `ask_hosts` show a request and return the answer."""

    def __init__(self, file: Path, ask: Ask = refuse_all, ask_hosts: AskHosts = refuse_all) -> None:
        self.ask, self.ask_hosts = ask, ask_hosts
        self.code, self.hosts = AllowedCode(file), AllowedHosts(file)

    def obtain(self, *every: Mapping[str, Any], base: Path | None = None) -> bool:
        """True if all user code of runs with these raw settings may run, after at most one question."""
        missing = (each for settings in every for each in self.code.missing(settings, base))
        requests = {(each.code.path, each.rights): each for each in missing}
        if requests and not self.ask([*requests.values()]):
            return False
        self.code.allow(requests.values())
        return True

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
