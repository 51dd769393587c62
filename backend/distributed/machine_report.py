"""What a check of several machines found: the facts of each, the speed of what connects them, and the findings.

Plain data, which the command line prints and the window draws. `backend.distributed.machine_findings` turns facts into findings.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from backend.utils.disk_faults import gigabytes

Level = Literal["refuse", "warn", "info"]
LEVELS: tuple[Level, ...] = ("refuse", "warn", "info")

COPY_LIMIT = 8_000_000_000
"""Bytes of the largest model that is copied: a minute and a half over gigabit Ethernet. A larger one is better downloaded there."""
RESERVE = 2_000_000_000
"""Bytes that must stay free on a machine's disk."""
GRADIENT_BYTES = 20_000_000
"""Of a LoRA adapter of rank 8 on every layer of a 4B model, in float32: what is summed once an update."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a machine says of itself. Sizes in bytes."""

    machine: str = ""
    """Its host name."""
    system: str = ""
    chip: str = ""
    device: str = ""
    """gpu or cpu: what a run computes on there."""
    memory: int = 0
    memory_free: int = 0
    memory_usable: int = 0
    """What a run may use of it."""
    disk_free: int | None = None
    """On the disk where models are kept."""
    python: str = ""
    grpo_studio: str = ""
    code: str = ""
    """A digest of GRPO Studio's source files; "" in a frozen app."""
    mlx: str = ""
    mlx_lm: str = ""
    has_mpi: bool = False
    rdma_devices: tuple[str, ...] = ()
    model: str = ""
    """A digest of the names and sizes of the model's files; "" where it is not there, or none was asked for."""
    model_bytes: int = 0
    has_reward_file: bool | None = None
    """None where none was asked for."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> MachineFacts:
        """Of a machine with another version, which may say more, or less."""
        names = {about.name for about in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in raw.items() if name in names}
        values["rdma_devices"] = tuple(values.get("rdma_devices", ()))
        return cls(**values)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast the ranks sum numbers together."""

    latency_s: float
    """The median of sums of one number."""
    bytes_per_second: float
    """Of a large sum: its bytes over its time, the slower of the ranks."""
    neighbours: tuple[tuple[int, int, float], ...] = ()
    """(from rank, to rank, bytes per second) of one large array in each direction; empty where the backend sends none."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LinkSpeed:
        pairs = tuple((int(of), int(to), float(rate)) for of, to, rate in raw["neighbours"])
        return cls(float(raw["latency_s"]), float(raw["bytes_per_second"]), pairs)

    @property
    def gradient_s(self) -> float:
        """Seconds of the sum of a LoRA adapter's gradient."""
        return self.latency_s + GRADIENT_BYTES / max(self.bytes_per_second, 1.0)


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One thing worth knowing. `rank` is None where it is about all machines."""

    level: Level
    rank: int | None
    sentence: str


@dataclass(slots=True)
class CheckedMachine:
    """One entry of the hosts file, and what was found."""

    rank: int
    ssh: str
    label: str
    address: str = ""
    is_here: bool = False
    facts: MachineFacts | None = None
    problem: str = ""
    """Why there are no facts: a sentence."""


@dataclass(slots=True)
class MachineReport:
    """The whole check."""

    backend: str = ""
    machines: list[CheckedMachine] = field(default_factory=list[CheckedMachine])
    link: LinkSpeed | None = None
    findings: list[MachineFinding] = field(default_factory=list[MachineFinding])

    @property
    def refusals(self) -> list[MachineFinding]:
        return [finding for finding in self.findings if finding.level == "refuse"]

    @property
    def without_model(self) -> list[int]:
        """Ranks on other machines that have no copy of the model, or another one than this machine, and to which it can be copied."""
        first = self.machines[0].facts if self.machines else None
        if first is None or not first.model or first.model_bytes > COPY_LIMIT:
            return []
        others = (machine for machine in self.machines if not machine.is_here and machine.facts is not None)
        return [machine.rank for machine in others if machine.facts is not None and machine.facts.model != first.model]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> MachineReport:
        """What `to_dict` made, after a passage through JSON."""
        machines = [
            CheckedMachine(**machine | {"facts": facts and MachineFacts.from_dict(facts)})
            for machine in raw["machines"]
            for facts in [machine["facts"]]
        ]
        link = raw["link"] and LinkSpeed.from_dict(raw["link"])
        return cls(raw["backend"], machines, link, [MachineFinding(**finding) for finding in raw["findings"]])

    def link_sentence(self) -> str:
        """The speed of the connection in words; "" where it was not measured."""
        if (link := self.link) is None:
            return ""
        parts = [
            f"Over {self.backend}, a sum of one number takes {_short(1000 * link.latency_s)} ms",
            f"large sums run at {gigabytes(link.bytes_per_second)}/s",
            f"the gradient of a LoRA adapter ({gigabytes(GRADIENT_BYTES)}) takes {_short(link.gradient_s)} s",
        ]
        each = ", ".join(f"{of} → {to} {gigabytes(rate)}/s" for of, to, rate in link.neighbours)
        return f"{'; '.join(parts)}.{f' From rank to rank: {each}.' if each else ''}"


def _short(value: float) -> str:
    """Two digits; whole numbers from ten on."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
