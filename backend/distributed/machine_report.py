"""The result of a check of several machines, and its findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from backend.trainer.memory.estimate import format_bytes
from backend.utils.disk import gigabytes
from backend.utils.text import quote

Level = Literal["refuse", "warn", "info"]
LEVELS: tuple[Level, ...] = ("refuse", "warn", "info")  # refuse: no run would start; warn: slower or different

COPY_LIMIT = 8_000_000_000
RESERVE = 2_000_000_000  # bytes to leave free on a disk
GRADIENT_BYTES = 20_000_000  # of a rank-8 LoRA of a 4B model
SLOW_SUM_S = 2.0  # seconds of a slow sum of GRADIENT_BYTES
SLOW_LATENCY_S = 0.02  # seconds of a slow sum of one number


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A machine's description of itself. Sizes in bytes."""

    machine: str = ""  # its host name
    system: str = ""
    chip: str = ""
    device: str = ""  # gpu or cpu
    memory: int = 0
    memory_free: int = 0
    memory_usable: int = 0
    disk_free: int | None = None
    python: str = ""
    grpo_studio: str = ""
    code: str = ""  # digest of our source files
    mlx: str = ""
    mlx_lm: str = ""
    has_mpi: bool = False
    rdma_devices: tuple[str, ...] = ()
    model: str = ""  # digest of the model's files
    model_bytes: int = 0
    has_reward_file: bool | None = None


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast `ranks` ranks sum numbers together."""

    latency_s: float  # of sums of one number
    bytes_per_second: float  # of a large sum
    ranks: int = 2

    @property
    def gradient_s(self) -> float:
        return self.latency_s + GRADIENT_BYTES / max(self.bytes_per_second, 1.0)


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One thing worth knowing. `rank` is None where it is about all machines."""

    level: Level
    rank: int | None
    sentence: str


@dataclass(slots=True)
class CheckedMachine:
    """One entry of the hosts file."""

    rank: int
    ssh: str
    label: str
    address: str = ""
    is_here: bool = False
    facts: MachineFacts | None = None
    problem: str = ""  # why there are no facts


@dataclass(slots=True)
class MachineReport:
    backend: str = ""
    machines: list[CheckedMachine] = field(default_factory=list[CheckedMachine])
    link: LinkSpeed | None = None
    findings: list[MachineFinding] = field(default_factory=list[MachineFinding])

    @property
    def refusals(self) -> list[MachineFinding]:
        return [finding for finding in self.findings if finding.level == "refuse"]

    @property
    def without_model(self) -> list[int]:
        """Ranks of other machines to which the model can be copied."""
        first = self.machines[0].facts if self.machines else None
        if first is None or not first.model or first.model_bytes > COPY_LIMIT:
            return []
        others = [machine for machine in self.machines if not machine.is_here]
        return [machine.rank for machine in others if machine.facts and machine.facts.model != first.model]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> MachineReport:
        return TypeAdapter(cls).validate_python(raw)

    def link_sentence(self) -> str:
        """The speed of the connection in words; "" where it was not measured."""
        if (link := self.link) is None:
            return ""
        return (
            f"A sum of one number takes {1000 * link.latency_s:.2g} ms; large sums run at "
            f"{gigabytes(link.bytes_per_second)}/s; the gradient of a LoRA adapter ({gigabytes(GRADIENT_BYTES)}) takes "
            f"{link.gradient_s:.2g} s."
        )


def findings_of(report: MachineReport, model: str = "", model_is_hub_id: bool = False) -> list[MachineFinding]:
    """Everything that the facts say, the gravest first. `model`: the setting."""
    found = [MachineFinding("refuse", machine.rank, machine.problem) for machine in report.machines if machine.problem]
    here = report.machines[0].facts
    others = {machine.ssh: machine for machine in reversed(report.machines[1:]) if not machine.is_here}
    for machine in others.values():
        if here is not None and machine.facts is not None:
            about = [
                *_differences(machine.label, here, machine.facts, report.backend),
                *_model_findings(machine.label, here, machine.facts, model, model_is_hub_id),
            ]
            found += [MachineFinding(level, machine.rank, sentence) for level, sentence in about]
    names = [report.machines[0].ssh if machine.is_here else machine.ssh for machine in report.machines]
    for name in dict.fromkeys(names):
        if (count := names.count(name)) > 1:
            label = "This machine" if report.machines[names.index(name)].is_here else quote(name, 40)
            shared = "its ranks share its processor, and each holds a model in its memory"
            found.append(MachineFinding("info", names.index(name), f"{label} is listed {count} times: {shared}."))
    if report.link is not None and (report.link.gradient_s > SLOW_SUM_S or report.link.latency_s > SLOW_LATENCY_S):
        sums = f"a sum of one number takes {1000 * report.link.latency_s:.2g} ms, the gradient of a LoRA adapter, "
        sums += f"{gigabytes(GRADIENT_BYTES)}, {report.link.gradient_s:.3g} s"
        found.append(MachineFinding("warn", None, f"The connection is slow: {sums}. A cable is faster than Wi-Fi."))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


Found = Iterator[tuple[Level, str]]


def _differences(name: str, here: MachineFacts, there: MachineFacts, backend: str) -> Found:
    if here.grpo_studio != there.grpo_studio:
        versions = f"{quote(there.grpo_studio, 20)}, here is {here.grpo_studio}"
        yield "refuse", f"{name} has GRPO Studio {versions}. Install the same version on both."
    elif there.code and here.code and there.code != here.code:
        yield "warn", f"{name} has other source files of the same GRPO Studio. Update both from one place."
    for title, ours, theirs in (("mlx", here.mlx, there.mlx), ("mlx-lm", here.mlx_lm, there.mlx_lm)):
        if ours != theirs:
            versions = f"{title} {quote(theirs, 20)}, here is {ours}"
            yield "warn", f"{name} has {versions}: results of the two may differ in their last digits."
    if here.device != there.device:
        devices = f"computes on the {quote(there.device.upper(), 10)}, this machine on the {here.device.upper()}"
        yield "warn", f"{name} {devices}: it will get a small share of the work."
    elif here.chip != there.chip:
        chips = f"({quote(there.chip, 40)}, here {quote(here.chip, 40)})"
        yield "info", f"{name} has another chip {chips}; each gets work by its measured speed."
    if abs(here.memory - there.memory) > 0.05 * here.memory:
        smaller, larger = sorted((here.memory, there.memory))
        label = name if there.memory < here.memory else "this machine"
        yield (
            "warn" if smaller < 0.5 * larger else "info",
            f"{name} has {format_bytes(there.memory)} of memory, this machine {format_bytes(here.memory)}; every "
            f"machine holds the whole model, so {label} sets the limit.",
        )
    if backend == "mpi" and not there.has_mpi:
        yield "refuse", f"{name} has no mpirun. Install Open MPI there, the same version as here."
    if backend.startswith("jaccl") and not there.rdma_devices:
        needs = "It needs Thunderbolt 5, macOS 26.2 or later, and rdma_ctl enable in Recovery."
        yield "refuse", f"{name} shows no RDMA devices. {needs}"


def _model_findings(name: str, here: MachineFacts, there: MachineFacts, model: str, is_hub_id: bool) -> Found:
    if there.has_reward_file is False:
        yield "info", f"{name} has no reward file: its text is sent. Modules beside it are not, so copy those."
    if not model or not here.model or there.model == here.model:
        return
    title, size = quote(model, 60), gigabytes(here.model_bytes)
    needed = here.model_bytes + RESERVE
    copying = f"It can be copied from here ({size})."
    if here.model_bytes > COPY_LIMIT:
        copying = f"With {size} it is above the {gigabytes(COPY_LIMIT)} that are copied; put it there yourself."
    if there.disk_free is not None and there.disk_free < needed:
        room = f"{gigabytes(there.disk_free)} are free, {gigabytes(needed)} needed"
        yield "refuse", f"{name} lacks the model and the room for it: {room}."
    elif there.model:
        yield "refuse", f"{name} has other files of {title} than this machine. {copying}"
    elif is_hub_id:
        yield "warn", f"{name} has no copy of {title} and will download it ({size}) when the run starts. {copying}"
    else:
        yield "refuse", f"{name} has no folder {title}. {copying}"
