"""Consent to run the user's reward code: asked before a file first runs, and again when its contents have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.config import config
from backend.distributed.hosts_file import AllowedHosts, HostsToAllow
from backend.rewards.allowed_code import AllowedCode, CodeFile, CodeToAllow, Rights
from backend.runs.run_folder import RunFolder

Ask = Callable[[Sequence[CodeToAllow]], bool]
AskHosts = Callable[[HostsToAllow], bool]


def refuse_all(_request: object) -> bool:
    """The answer without a window, when there is no user to ask."""
    return False


class Consent:
    """What the user has allowed. `ask` and `ask_hosts` show what is to be allowed and return the answer."""

    def __init__(self, file: Path, ask: Ask = refuse_all, ask_hosts: AskHosts = refuse_all) -> None:
        self.ask, self.ask_hosts = ask, ask_hosts
        self._allowed, self._allowed_hosts = AllowedCode(file), AllowedHosts(file)

    def obtain(self, settings: Mapping[str, Any], base: Path | None = None) -> bool:
        """True if all user code of a run with these raw settings may run."""
        return self.obtain_all([settings], base)

    def obtain_all(self, every: Iterable[Mapping[str, Any]], base: Path | None = None) -> bool:
        """`obtain` for several runs, as of a sweep, with one question."""
        missing = (each for settings in every for each in self.unconfirmed(settings, base))
        requests = {(each.code.path, each.rights): each for each in missing}
        if requests and not self.ask([*requests.values()]):
            return False
        self._allowed.allow(requests.values())
        return True

    def obtain_for_run(self, run: RunFolder) -> bool:
        """`obtain` for the code that a run folder names. Raises UserError for broken settings."""
        return self.obtain(config.read(run.config), run.path)

    def unconfirmed(self, settings: Mapping[str, Any], base: Path | None = None) -> list[CodeToAllow]:
        """The code whose present contents are not allowed yet."""
        return self._allowed.missing(settings, base)

    def trusted(self, settings: Mapping[str, Any], base: Path | None = None) -> dict[str, str]:
        """Path → SHA-256 of the allowed code that these settings name."""
        return self._allowed.fingerprints(settings, base)

    def rights(self, code: CodeFile) -> Rights | None:
        """With which rights these contents may run; None where they may not."""
        return self._allowed.rights(code)

    def allow(self, code: CodeFile, rights: Rights) -> None:
        """Remember these contents."""
        self._allowed.allow([CodeToAllow(code, changed=False, rights=rights)])

    def obtain_hosts(self, name: str) -> bool:
        """True if the machines of this hosts file may be contacted."""
        asked = self._allowed_hosts.missing(name)
        if asked is None:
            return True
        if not self.ask_hosts(asked):
            return False
        self._allowed_hosts.allow(asked)
        return True

    def has_hosts(self, name: str) -> bool:
        """`obtain_hosts` without a question."""
        return self._allowed_hosts.missing(name) is None

    def allow_hosts(self, name: str) -> None:
        """Remember what the user has just written into a hosts file."""
        if (asked := self._allowed_hosts.missing(name)) is not None:
            self._allowed_hosts.allow(asked)
