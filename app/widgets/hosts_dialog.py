"""The question before a hosts file is first used: which machines it names, what is started there, and what is sent to them."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.widgets.basic.allow_dialog import AllowDialog, ShownFile, StatedFact
from backend.distributed.allowed_hosts import HostsToAllow
from backend.distributed.hosts_file import Host
from backend.utils.text import quote

MOST_LINES = 12
"""Machines, and programs, that are listed."""
MEANING = (
    "GRPO Studio connects to each of them over ssh, with your keys, and starts itself there. A run sends them its prompts, completions, "
    "the text of its reward file and its weights, unencrypted. Allow only machines that you know."
)
HERE_ALONE = (
    "All of them are on this machine. While they train, MLX opens ports at the addresses of the file, which ask for no proof. Allow only a "
    "file that you know."
)


class HostsDialog(AllowDialog):
    """The question, with Allow and Do Not Connect."""

    def __init__(self, asked: HostsToAllow, parent: QWidget | None = None) -> None:
        name = quote(asked.path.name, 60)
        question = (
            f"{name} has changed since you allowed it. Use it as it is now?"
            if asked.changed
            else f"Connect to the machines in {name}?"
            if asked.others
            else f"Train with the ranks in {name}?"
        )
        super().__init__(
            "Machines", question, MEANING if asked.others else HERE_ALONE, [ShownFile(asked.path, _facts(asked))],
            "Allow and Connect", "Do Not Connect", parent,
        )  # fmt: skip


def _facts(asked: HostsToAllow) -> list[StatedFact]:
    others = asked.others
    here = [host for rank, host in enumerate(asked.hosts.hosts) if asked.hosts.is_here(rank)]
    facts = [
        StatedFact("File", str(asked.path)),
        StatedFact("Machines", _lines([_machine(host) for host in others]) or f"this one, with {len(here)} ranks"),
    ]
    if programs := [
        f"{quote(host.ssh, 40)}: {quote(place, 90)}" for host in others if (place := host.program or host.folder)
    ]:
        facts.append(StatedFact("Starts there", _lines(programs), warns=True))
    if addresses := [address for host in here for address in host.ips]:
        facts.append(StatedFact("Listens at", _lines(list(dict.fromkeys(addresses)))))
    if asked.hosts.envs:
        facts.append(StatedFact("Sets", _lines([quote(variable, 90) for variable in asked.hosts.envs])))
    return facts


def _machine(host: Host) -> str:
    elsewhere = ", ".join(address for address in host.ips if address != host.ssh)
    return f"{quote(host.ssh, 90)}{f' at {elsewhere}' if elsewhere else ''}"


def _lines(texts: list[str]) -> str:
    more = [f"and {len(texts) - MOST_LINES} more"] if len(texts) > MOST_LINES else []
    return "\n".join([*texts[:MOST_LINES], *more])
