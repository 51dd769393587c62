"""Which hosts files may be used on this machine: path → SHA-256 of the contents that a person has allowed, in the record of
`backend.rewards.trust_record`.

A run on several machines opens connections to each of them with the user's ssh keys, starts programs there, and sends them the run. A person
allows that in the window, which asks, or on the command line by naming the file: with `--hosts`, in a YAML file given to `train`, or to the
verb `machines`. A run folder names a hosts file too, and may come from somebody else: whoever is about to train it asks `require_hosts`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.distributed.hosts_file import HOSTS_LIMIT, Host, HostsFile, read_hosts
from backend.rewards.trust_record import TrustRecord
from backend.utils.errors import UserError
from backend.utils.files import read_bytes, resolved, user_path
from backend.utils.text import quote

_ENTRY = "hosts"
"""The key in the record that holds all hosts files; a reward file's key is an absolute path."""


@dataclass(frozen=True, slots=True)
class HostsToAllow:
    """A hosts file that may not be used yet. `changed`: earlier contents of it were allowed."""

    path: Path
    fingerprint: str
    hosts: HostsFile
    changed: bool

    @property
    def others(self) -> list[Host]:
        """The machines besides this one, each once."""
        away = (host for rank, host in enumerate(self.hosts.hosts) if not self.hosts.is_here(rank))
        return list({host.ssh: host for host in away}.values())


class AllowedHosts:
    """The hosts files in a record, by default that of this machine (`TrustRecord`)."""

    def __init__(self, file: Path | None = None) -> None:
        self._record = TrustRecord(file)

    def missing(self, name: str) -> HostsToAllow | None:
        """The hosts file of this name where its present contents are not allowed. None for "", and for a file that cannot be used at all:
        the run says why."""
        try:
            asked = _read(name) if name.strip() else None
        except UserError:
            return None
        if asked is None or (known := self._fingerprints().get(str(asked.path))) == asked.fingerprint:
            return None
        return HostsToAllow(asked.path, asked.fingerprint, asked.hosts, changed=known is not None)

    def allow(self, asked: HostsToAllow) -> None:
        """Remember these contents."""
        self._record.add({_ENTRY: self._fingerprints() | {str(asked.path): asked.fingerprint}})

    def _fingerprints(self) -> dict[str, str]:
        kept = self._record.read().get(_ENTRY)
        return (
            {path: str(sum_) for path, sum_ in cast("dict[str, Any]", kept).items()} if isinstance(kept, dict) else {}
        )


def allow_hosts(name: str) -> None:
    """A person has named this hosts file on the command line: remember it as allowed."""
    record = AllowedHosts()
    if (asked := record.missing(name)) is not None:
        record.allow(asked)


def require_hosts(name: str) -> None:
    """Raise UserError for the hosts file of a run folder that was never allowed here.

    As with reward files, on the command line one that was allowed once may have been edited since; the window asks again.
    """
    asked = AllowedHosts().missing(name)
    if asked is not None and not asked.changed:
        raise UserError(
            "hosts",
            f"The hosts file {quote(asked.path, 66)} was never allowed on this machine. Read it; the verb machines checks "
            "and allows it, and --hosts none trains here alone.",
        )


def _read(name: str) -> HostsToAllow:
    path = resolved(user_path(name, "hosts"))
    fingerprint = hashlib.sha256(read_bytes(path, "hosts", HOSTS_LIMIT)).hexdigest()
    return HostsToAllow(path, fingerprint, read_hosts(path), changed=False)
