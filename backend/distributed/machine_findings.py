"""What the facts of several machines mean for a run: differences, missing files, slow connections, each one sentence with its level.

refuse: a run would not start, or would end; warn: it would be slow or a little different; info: worth knowing. Nobody is contacted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backend.distributed.machine_report import (
    COPY_LIMIT,
    GRADIENT_BYTES,
    LEVELS,
    RESERVE,
    CheckedMachine,
    Level,
    MachineFacts,
    MachineFinding,
    MachineReport,
)
from backend.trainer.memory.estimate import format_bytes
from backend.utils.disk_faults import gigabytes
from backend.utils.text import quote

SLOW_SUM_S = 2.0
"""Seconds of such a sum from which the connection is called slow."""
SLOW_LATENCY_S = 0.02
"""Seconds of a sum of one number: Wi-Fi that saves power takes tens of milliseconds, a cable less than one."""


def findings_of(report: MachineReport, model: str = "", model_is_hub_id: bool = False) -> list[MachineFinding]:
    """Everything that the facts of a report say, the gravest first; `model`: the setting, where one was asked about."""
    found = [
        *_unreachable(report),
        *_versions(report),
        *_models(report, model, model_is_hub_id),
        *_hardware(report),
        *_shared(report),
        *_link(report),
    ]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _unreachable(report: MachineReport) -> Iterator[MachineFinding]:
    for machine in report.machines:
        if machine.problem:
            yield MachineFinding("refuse", machine.rank, machine.problem)


def _compared(report: MachineReport) -> Iterator[tuple[MachineFacts, CheckedMachine, MachineFacts]]:
    """(facts of this machine, another machine, its facts); ranks of one machine count once."""
    first = report.machines[0].facts
    others = [machine for machine in report.machines[1:] if not machine.is_here]
    for machine in {machine.ssh: machine for machine in reversed(others)}.values():
        if first is not None and machine.facts is not None:
            yield first, machine, machine.facts


def _versions(report: MachineReport) -> Iterator[MachineFinding]:
    for here, machine, there in _compared(report):
        name = machine.label
        if there.grpo_studio != here.grpo_studio:
            versions = f"{quote(there.grpo_studio, 20)}, here is {here.grpo_studio}"
            sentence = f"{name} has GRPO Studio {versions}. Install the same version on both."
            yield MachineFinding("refuse", machine.rank, sentence)
        elif there.code and here.code and there.code != here.code:
            sentence = (
                f"{name} has the same version of GRPO Studio, but other source files. Update both from one place."
            )
            yield MachineFinding("warn", machine.rank, sentence)
        for title, ours, theirs in (("mlx", here.mlx, there.mlx), ("mlx-lm", here.mlx_lm, there.mlx_lm)):
            if ours != theirs:
                sentence = f"{name} has {title} {quote(theirs, 20)}, here is {ours}: results of the two may differ in their last digits."
                yield MachineFinding("warn", machine.rank, sentence)
        if _minor(here.python) != _minor(there.python):
            yield MachineFinding(
                "info", machine.rank, f"{name} has Python {quote(there.python, 20)}, here is {here.python}."
            )
        if here.system != there.system:
            sentence = f"{name} runs {quote(there.system, 40)}, this machine {here.system}."
            yield MachineFinding("info", machine.rank, sentence)


def _models(report: MachineReport, model: str, is_hub_id: bool) -> Iterator[MachineFinding]:
    for here, machine, there in _compared(report):
        if there.has_reward_file is False:
            sentence = f"{machine.label} has no reward file, and needs none: its text is sent. Modules beside it are not, so copy those."
            yield MachineFinding("info", machine.rank, sentence)
        if not model or not here.model or there.model == here.model:
            continue
        name, size = quote(model, 60), gigabytes(here.model_bytes)
        needed = here.model_bytes + RESERVE
        if there.disk_free is not None and there.disk_free < needed:
            sentence = f"{machine.label} lacks the model and the room for it: {gigabytes(there.disk_free)} are free, {gigabytes(needed)} needed."
            yield MachineFinding("refuse", machine.rank, sentence)
        elif there.model:
            yield MachineFinding(
                "refuse",
                machine.rank,
                f"{machine.label} has other files of {name} than this machine. {_copying(here, size)}",
            )
        elif is_hub_id:
            sentence = f"{machine.label} has no copy of {name} and will download it ({size}) when the run starts. {_copying(here, size)}"
            yield MachineFinding("warn", machine.rank, sentence)
        else:
            yield MachineFinding(
                "refuse", machine.rank, f"{machine.label} has no folder {name}. {_copying(here, size)}"
            )


def _copying(here: MachineFacts, size: str) -> str:
    if here.model_bytes <= COPY_LIMIT:
        return f"It can be copied from here ({size})."
    return f"With {size} it is above the {gigabytes(COPY_LIMIT)} that are copied; put it there yourself."


def _hardware(report: MachineReport) -> Iterator[MachineFinding]:
    for here, machine, there in _compared(report):
        name = machine.label
        if here.device != there.device:
            sentence = f"{name} computes on the {quote(there.device.upper(), 10)}, this machine on the {here.device.upper()}: it will get a small share of the work."
            yield MachineFinding("warn", machine.rank, sentence)
        elif here.chip != there.chip:
            sentence = f"{name} has another chip ({quote(there.chip, 40)}, here {quote(here.chip, 40)}); each gets work by its measured speed."
            yield MachineFinding("info", machine.rank, sentence)
        if abs(here.memory - there.memory) > 0.05 * here.memory:
            smaller, name_of_smaller = (there, name) if there.memory < here.memory else (here, "this machine")
            sentence = (
                f"{name} has {format_bytes(there.memory)} of memory, this machine {format_bytes(here.memory)}; every machine holds the whole "
                f"model, so {name_of_smaller} sets the limit."
            )
            level: Level = "warn" if smaller.memory < 0.5 * max(here.memory, there.memory) else "info"
            yield MachineFinding(level, machine.rank, sentence)
        if report.backend == "mpi" and not there.has_mpi:
            yield MachineFinding(
                "refuse", machine.rank, f"{name} has no mpirun. Install Open MPI there, the same version as here."
            )
        if report.backend.startswith("jaccl") and not there.rdma_devices:
            sentence = f"{name} shows no RDMA devices. It needs Thunderbolt 5, macOS 26.2 or later, and rdma_ctl enable in Recovery."
            yield MachineFinding("refuse", machine.rank, sentence)


def _shared(report: MachineReport) -> Iterator[MachineFinding]:
    names = [report.machines[0].ssh if machine.is_here else machine.ssh for machine in report.machines]
    for name in dict.fromkeys(names):
        if (count := names.count(name)) > 1:
            rank = names.index(name)
            label = "This machine" if report.machines[rank].is_here else quote(name, 40)
            sentence = f"{label} is listed {count} times: its ranks share its processor, and each holds a model of its own in its memory."
            yield MachineFinding("info", rank, sentence)


def _link(report: MachineReport) -> Iterator[MachineFinding]:
    if (link := report.link) is None:
        return
    if link.gradient_s > SLOW_SUM_S:
        sentence = (
            f"The connection is slow: the gradient of a LoRA adapter, {gigabytes(GRADIENT_BYTES)}, takes {link.gradient_s:.3g} s to sum. "
            "A cable is faster than Wi-Fi."
        )
        yield MachineFinding("warn", None, sentence)
    if link.latency_s > SLOW_LATENCY_S:
        sentence = f"Even a sum of one number takes {1000 * link.latency_s:.3g} ms over this connection. A cable takes less than one."
        yield MachineFinding("warn", None, sentence)


def _minor(version: str) -> Sequence[str]:
    return version.split(".")[:2]
