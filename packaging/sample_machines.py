"""Two Macs for the pictures of the Machines card: a hosts file, and what a check of them would have found. No machine
is contacted."""

from __future__ import annotations

from pathlib import Path

from backend.distributed.hosts_file import Host, HostsFile, write_hosts
from backend.distributed.machine_report import CheckedMachine, LinkSpeed, MachineFacts, MachineReport, findings_of

HERE, THERE = "127.0.0.1", "studio.local"
MODEL = "mlx-community/Qwen3-0.6B-4bit"


def hosts_file() -> str:
    """The path of a hosts file in the home folder of the pictures. Raises DiskError."""
    write_hosts(Path.home() / "two-macs.json", HostsFile((Host(HERE, ("10.0.0.1",)), Host(THERE, ("10.0.0.2",)))))
    return "~/two-macs.json"


def report() -> MachineReport:
    """Two unlike Macs on a Thunderbolt cable, of which the second has no copy of the model."""
    first = _facts("anna-mbp.local", "Apple M4 Max", 68.7e9, 44.1e9, "d")
    second = _facts("studio.local", "Apple M2 Ultra", 137.4e9, 118e9, "")
    machines = [
        CheckedMachine(0, HERE, "this machine", "10.0.0.1", is_here=True, facts=first),
        CheckedMachine(1, THERE, THERE, "10.0.0.2", facts=second),
    ]
    found = MachineReport("ring", machines, LinkSpeed(0.0003, 1.1e9))
    found.findings = findings_of(found, MODEL, model_is_hub_id=True)
    return found


def _facts(name: str, chip: str, memory: float, free: float, model: str) -> MachineFacts:
    return MachineFacts(
        machine=name,
        system="macOS 26.2",
        chip=chip,
        device="gpu",
        memory=int(memory),
        memory_free=int(free),
        memory_usable=int(0.7 * memory),
        disk_free=512 * 10**9,
        python="3.12.4",
        grpo_studio="0.1.0",
        mlx="0.32.4",
        mlx_lm="0.32.2",
        model=model,
        model_bytes=335_000_000 if model else 0,
    )
