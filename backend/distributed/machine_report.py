"""The result of a check of several machines: plain data, which the command line prints and the window draws, and its
findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from backend.trainer.memory.estimate import format_bytes
from backend.utils.disk_faults import gigabytes
from backend.utils.text import quote

Level = Literal["refuse", "warn", "info"]
LEVELS: tuple[Level, ...] = ("refuse", "warn", "info")
"""refuse: a run would not start, or would end; warn: it would be slow or a little different."""

COPY_LIMIT = 8_000_000_000
"""Bytes of the largest model that is copied: a minute and a half over gigabit Ethernet. A larger one is better
downloaded there."""
RESERVE = 2_000_000_000
"""Bytes that must stay free on a machine's disk."""
GRADIENT_BYTES = 20_000_000
"""Of a LoRA adapter of rank 8 on every layer of a 4B model, in float32: summed once an update."""
SLOW_SUM_S = 2.0
"""Seconds of such a sum from which the connection is called slow."""
SLOW_LATENCY_S = 0.02
"""Seconds of a sum of one number: Wi-Fi that saves power takes tens of milliseconds, a cable less than one."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A machine's description of itself. Sizes in bytes."""

    machine: str = ""
    """Its host name."""
    system: str = ""
    chip: str = ""
    device: str = ""
    """gpu or cpu: what a run computes on there."""
    memory: int = 0
    memory_free: int = 0
    memory_usable: int = 0
    """The part that a run may use."""
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
    """A digest of the model's files; "" where it is not there, or none was asked for."""
    model_bytes: int = 0
    has_reward_file: bool | None = None
    """None where none was asked for."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> MachineFacts:
        """From a machine with another version, which may say more, or less."""
        names = {about.name for about in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in raw.items() if name in names}
        values["rdma_devices"] = tuple(values.get("rdma_devices", ()))
        return cls(**values)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast `ranks` ranks sum numbers together."""

    latency_s: float
    """The median of sums of one number."""
    bytes_per_second: float
    """Of a large sum: its bytes over its time."""
    ranks: int = 2

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
    """One entry of the hosts file."""

    rank: int
    ssh: str
    label: str
    address: str = ""
    is_here: bool = False
    facts: MachineFacts | None = None
    problem: str = ""
    """Why there are no facts."""


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
        """Ranks on other machines whose model is missing or another one than here, and to which it can be copied."""
        first = self.machines[0].facts if self.machines else None
        if first is None or not first.model or first.model_bytes > COPY_LIMIT:
            return []
        others = [machine for machine in self.machines if not machine.is_here]
        return [machine.rank for machine in others if machine.facts and machine.facts.model != first.model]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> MachineReport:
        """The inverse of `to_dict`, after a passage through JSON."""
        machines = [
            CheckedMachine(**machine | {"facts": facts and MachineFacts.from_dict(facts)})
            for machine in raw["machines"]
            for facts in [machine["facts"]]
        ]
        link = raw["link"] and LinkSpeed(**raw["link"])
        return cls(raw["backend"], machines, link, [MachineFinding(**finding) for finding in raw["findings"]])

    def link_sentence(self) -> str:
        """The speed of the connection in words; "" where it was not measured."""
        if (link := self.link) is None:
            return ""
        return (
            f"A sum of one number takes {_short(1000 * link.latency_s)} ms; large sums run at "
            f"{gigabytes(link.bytes_per_second)}/s; the gradient of a LoRA adapter ({gigabytes(GRADIENT_BYTES)}) takes "
            f"{_short(link.gradient_s)} s."
        )


def _short(value: float) -> str:
    """Two digits; whole numbers from ten on."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def findings_of(report: MachineReport, model: str = "", model_is_hub_id: bool = False) -> list[MachineFinding]:
    """Everything that the facts of a report say, the gravest first; `model`: the setting, where one was asked about."""
    found = [MachineFinding("refuse", machine.rank, machine.problem) for machine in report.machines if machine.problem]
    here = report.machines[0].facts
    others = [machine for machine in report.machines[1:] if not machine.is_here]
    for machine in {
        machine.ssh: machine for machine in reversed(others)
    }.values():  # the ranks of one machine count once
        if here is not None and (there := machine.facts) is not None:
            about = [
                *_version_findings(machine.label, here, there),
                *_model_findings(machine.label, here, there, model, model_is_hub_id),
                *_hardware_findings(machine.label, here, there, report.backend),
            ]
            found += [MachineFinding(level, machine.rank, sentence) for level, sentence in about]
    names = [report.machines[0].ssh if machine.is_here else machine.ssh for machine in report.machines]
    for name in dict.fromkeys(names):
        if (count := names.count(name)) > 1:
            rank = names.index(name)
            label = "This machine" if report.machines[rank].is_here else quote(name, 40)
            sentence = (
                f"{label} is listed {count} times: its ranks share its processor, and each holds a model in its memory."
            )
            found.append(MachineFinding("info", rank, sentence))
    if (link := report.link) is not None and link.gradient_s > SLOW_SUM_S:
        sentence = (
            f"The connection is slow: the gradient of a LoRA adapter, {gigabytes(GRADIENT_BYTES)}, takes "
            f"{link.gradient_s:.3g} s to sum. A cable is faster than Wi-Fi."
        )
        found.append(MachineFinding("warn", None, sentence))
    if link is not None and link.latency_s > SLOW_LATENCY_S:
        latency = f"{1000 * link.latency_s:.3g} ms"
        sentence = f"Even a sum of one number takes {latency} over this connection. A cable takes less than one."
        found.append(MachineFinding("warn", None, sentence))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


Found = Iterator[tuple[Level, str]]


def _version_findings(name: str, here: MachineFacts, there: MachineFacts) -> Found:
    if there.grpo_studio != here.grpo_studio:
        versions = f"{quote(there.grpo_studio, 20)}, here is {here.grpo_studio}"
        yield "refuse", f"{name} has GRPO Studio {versions}. Install the same version on both."
    elif there.code and here.code and there.code != here.code:
        yield (
            "warn",
            f"{name} has the same version of GRPO Studio, but other source files. Update both from one place.",
        )
    for title, ours, theirs in (("mlx", here.mlx, there.mlx), ("mlx-lm", here.mlx_lm, there.mlx_lm)):
        if ours != theirs:
            versions = f"{title} {quote(theirs, 20)}, here is {ours}"
            yield "warn", f"{name} has {versions}: results of the two may differ in their last digits."
    if here.python.split(".")[:2] != there.python.split(".")[:2]:
        yield "info", f"{name} has Python {quote(there.python, 20)}, here is {here.python}."
    if here.system != there.system:
        yield "info", f"{name} runs {quote(there.system, 40)}, this machine {here.system}."


def _model_findings(name: str, here: MachineFacts, there: MachineFacts, model: str, is_hub_id: bool) -> Found:
    if there.has_reward_file is False:
        yield (
            "info",
            f"{name} has no reward file, and needs none: its text is sent. Modules beside it are not, so copy those.",
        )
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


def _hardware_findings(name: str, here: MachineFacts, there: MachineFacts, backend: str) -> Found:
    if here.device != there.device:
        devices = f"computes on the {quote(there.device.upper(), 10)}, this machine on the {here.device.upper()}"
        yield "warn", f"{name} {devices}: it will get a small share of the work."
    elif here.chip != there.chip:
        chips = f"({quote(there.chip, 40)}, here {quote(here.chip, 40)})"
        yield "info", f"{name} has another chip {chips}; each gets work by its measured speed."
    if abs(here.memory - there.memory) > 0.05 * here.memory:
        smaller, label = (there, name) if there.memory < here.memory else (here, "this machine")
        yield (
            "warn" if smaller.memory < 0.5 * max(here.memory, there.memory) else "info",
            f"{name} has {format_bytes(there.memory)} of memory, this machine {format_bytes(here.memory)}; every "
            f"machine holds the whole model, so {label} sets the limit.",
        )
    if backend == "mpi" and not there.has_mpi:
        yield "refuse", f"{name} has no mpirun. Install Open MPI there, the same version as here."
    if backend.startswith("jaccl") and not there.rdma_devices:
        needs = "It needs Thunderbolt 5, macOS 26.2 or later, and rdma_ctl enable in Recovery."
        yield "refuse", f"{name} shows no RDMA devices. {needs}"
