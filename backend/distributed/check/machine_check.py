"""The check of several machines: reaches each, compares what they say, copies a model where that is wanted, and measures how fast they sum.

`check_machines` is all of it, for the verb `machines` and the window; `require_machines` the quick part, for a run that is about to start.
On every machine a process of ours answers (`backend.distributed.check.probe`): through ssh on others, directly here. Every wait has a limit,
and the processes have ended when the functions return, or end with the connection where it was lost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from backend.config.config import Config
from backend.distributed.backend_choice import AUTO, BackendChoice, choose_backend
from backend.distributed.check.machine_probes import FACTS_S, Abandoned, NotReached, Probe, in_parallel
from backend.distributed.check.machine_verbs import LINK, MARKER
from backend.distributed.check.model_copy import copy_model
from backend.distributed.check.probe import facts, has_cuda
from backend.distributed.hosts_file import (
    FIRST_PORT,
    MPI_OPTIONS,
    PORTS,
    Host,
    HostsFile,
    fault_of_first,
    rank_environment,
    rank_environment_of,
    rank_program,
    read_hosts,
    shell_words,
)
from backend.distributed.machine_findings import findings_of
from backend.distributed.machine_report import CheckedMachine, LinkSpeed, MachineFacts, MachineFinding, MachineReport
from backend.distributed.open_mpi import mpirun
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import is_folder, user_path
from backend.utils.text import quote

# Starts a measurement on all ranks at the same time, and judges what comes of it
# (`backend.distributed.check.link` measures).

LINK_S = 45.0
"""How long a measurement may take: loading mlx, connecting, and 60 sums; over Wi-Fi about 20 s."""
POLL_S = 0.1


def link_speed(hosts: HostsFile, backend: str, probes: Sequence[Probe], check: Callable[[], None]) -> LinkSpeed:
    """As the slowest rank measured it. `probes`: one for every rank, in order. Raises NotReached, and whatever `check` raises."""
    answers = _by_mpi(hosts, check) if backend == "mpi" else _by_probes(hosts, backend, probes)
    speeds = [LinkSpeed.from_dict(answer["speed"]) for answer in answers]
    if any(answer["size"] != len(hosts.hosts) for answer in answers):
        raise NotReached(f"Only {answers[0]['size']} of {len(hosts.hosts)} ranks have found each other over {backend}.")
    latency, rate = max(speed.latency_s for speed in speeds), min(speed.bytes_per_second for speed in speeds)
    return LinkSpeed(latency, rate, speeds[0].neighbours)


def _by_probes(hosts: HostsFile, backend: str, probes: Sequence[Probe]) -> list[dict[str, Any]]:
    port = FIRST_PORT + random.randrange(PORTS)
    answers: dict[int, dict[str, Any]] = {}
    problems: list[str] = []

    def measure(probe: Probe) -> None:
        environment = rank_environment_of(hosts, backend, probe.rank, port)
        request = {"ask": "link", "backend": backend, "variables": environment.variables, "files": environment.files}
        try:
            answers[probe.rank] = probe.ask(request, LINK_S)
        except NotReached as problem:
            problems.append(str(problem))
            # The others wait for this rank and would do so until the time is over.
            for other in probes:
                other.abandon.set()
        except Abandoned:
            pass

    in_parallel(measure, probes)
    if problems:
        advice = "A firewall may be between them, or an address in the hosts file wrong."
        raise NotReached(f"The machines could not sum over {backend}. {problems[0]} {advice}")
    return [answers[rank] for rank in range(len(probes))]


def _by_mpi(hosts: HostsFile, check: Callable[[], None]) -> list[dict[str, Any]]:
    """mpirun starts ranks of its own, of which the first answers for all."""
    process = subprocess.Popen(
        _mpi_command(hosts),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out = _output_of(process, check)
    finally:
        # SIGTERM lets mpirun end its ranks on all machines; each has a limit on its life besides.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                process.wait(timeout=3)
    lines = out.decode(errors="replace").splitlines()
    answers = [json.loads(line.partition(MARKER)[2]) for line in lines if MARKER in line]
    if not answers:
        said = [line for line in lines if line.strip(" -")]
        raise NotReached(
            f"The machines could not sum over mpi: {quote(said[0] if said else 'mpirun gave no reason', 120)}."
        )
    return answers


def _output_of(process: subprocess.Popen[bytes], check: Callable[[], None]) -> bytes:
    deadline = time.monotonic() + LINK_S
    while True:
        check()
        try:
            return process.communicate(timeout=POLL_S)[0]
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise NotReached(f"The machines have not summed over mpi within {LINK_S:.0f} s.") from None


def _mpi_command(hosts: HostsFile) -> list[str]:
    """One part for each group of equal hosts, since they may have different programs."""
    words = ["mpirun", "--oversubscribe", *MPI_OPTIONS]
    for number, (host, group) in enumerate(groupby(hosts.hosts, key=_program_of)):
        count = str(len(list(group)))
        words += [":"] if number else []
        variables = {**rank_environment(host), **dict(entry.split("=", 1) for entry in hosts.envs)}
        program = [*(f"{name}={value}" for name, value in variables.items()), *rank_program(host, LINK)]
        words += ["-np", count, "--host", f"{host.ssh}:{count}", "sh", "-c", f"exec env {shell_words(program)}"]
    return words


def _program_of(host: Host) -> Host:
    return Host(host.ssh, program=host.program, folder=host.folder)


# ── machine check ────────────────────────────────────────────────────────────────────────────────────────────────────

Stage = Literal["reading", "read", "copying", "measuring"]
"""What is being done on a machine."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a check is about."""

    backend: str = AUTO
    """The setting `distributed_backend`."""
    model: str = ""
    reward_file: str = ""
    copies: bool = False
    """Whether the model is copied to machines that lack it."""


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """Where a check reports what it does, from several threads."""

    reached: Callable[[int, Stage, float | None], None] = lambda rank, stage, share: None
    """(rank, stage, the share that is done, of a copy)."""
    check: Callable[[], None] = lambda: None
    """Called several times a second; raises to give up."""


def check_machines(
    hosts: HostsFile, name: str, wanted: Wanted, progress: CheckProgress = CheckProgress()
) -> MachineReport:
    """Everything about the machines of a hosts file. `name`: the file's, for sentences. Raises what `progress.check` raises."""
    report = _empty_report(hosts)
    with _probes(hosts, range(len(hosts.hosts)), progress) as probes:
        _read_facts(report, probes, wanted, progress)
        if wanted.copies:
            _copy(report, hosts, wanted, progress)
            _read_facts(report, probes, wanted, progress)
        told = _choose(report, hosts, name, wanted)
        if not told and all(machine.facts is not None for machine in report.machines):
            told += _measure(report, hosts, probes, progress)
    report.findings = [*told, *_findings(report, wanted)]
    return report


def require_machines(
    hosts: HostsFile, name: str, wanted: Wanted, progress: CheckProgress = CheckProgress()
) -> MachineReport:
    """The facts of every machine, without copies and measurements: seconds. Raises UserError with everything that would keep a run from
    starting; the other findings are in the report."""
    report = _empty_report(hosts)
    ranks = [machine.rank for machine in report.machines if not machine.is_here]
    first_of = {hosts.hosts[rank].ssh: rank for rank in reversed(ranks)}
    with _probes(hosts, sorted(first_of.values()), progress) as probes:
        _read_facts(report, probes, wanted, progress)
    for machine in report.machines:
        if machine.is_here:
            machine.facts = facts(wanted.model, wanted.reward_file)
        else:
            like = report.machines[first_of[machine.ssh]]
            machine.facts, machine.problem = like.facts, like.problem
    report.findings = [*_choose(report, hosts, name, wanted), *_findings(report, wanted)]
    if report.refusals:
        raise UserError(
            [
                ConfigProblem("hosts", sentence)
                for sentence in dict.fromkeys(finding.sentence for finding in report.refusals)
            ]
        )
    return report


def _empty_report(hosts: HostsFile) -> MachineReport:
    machines = [
        CheckedMachine(rank, host.ssh, hosts.label(rank), host.ips[0] if host.ips else "", hosts.is_here(rank))
        for rank, host in enumerate(hosts.hosts)
    ]
    return MachineReport(machines=machines)


@contextmanager
def _probes(hosts: HostsFile, ranks: Sequence[int], progress: CheckProgress) -> Iterator[list[Probe]]:
    """A process on the machine of each rank; none is left afterwards."""
    probes = [Probe(hosts, rank, progress.check) for rank in ranks]
    try:
        yield probes
    finally:
        for probe in probes:
            probe.end()


def _read_facts(report: MachineReport, probes: Sequence[Probe], wanted: Wanted, progress: CheckProgress) -> None:
    def read(probe: Probe) -> None:
        machine = report.machines[probe.rank]
        progress.reached(probe.rank, "reading", None)
        try:
            answer = probe.ask({"ask": "facts", "model": wanted.model, "reward_file": wanted.reward_file}, FACTS_S)
            machine.facts, machine.problem = MachineFacts.from_dict(answer), ""
        except NotReached as problem:
            machine.problem = str(problem)
        progress.reached(probe.rank, "read", None)

    in_parallel(read, probes)


def _copy(report: MachineReport, hosts: HostsFile, wanted: Wanted, progress: CheckProgress) -> None:
    """Copy the model to every machine that lacks it, one after the other: they share this machine's connection."""
    copied: set[str] = set()
    for rank in report.without_model:
        host = hosts.hosts[rank]
        if host.ssh in copied:
            continue
        copied.add(host.ssh)

        def tell(share: float, rank: int = rank) -> None:
            progress.reached(rank, "copying", share)

        copy_model(wanted.model, host, hosts.label(rank), tell, progress.check)


def _choose(report: MachineReport, hosts: HostsFile, name: str, wanted: Wanted) -> list[MachineFinding]:
    """Set the backend of the report, or say why there is none."""
    told: list[MachineFinding] = []
    if fault := fault_of_first(hosts, name):
        told.append(MachineFinding("refuse", 0, fault.sentence))
    here = report.machines[0].facts
    try:
        choice = choose_backend(hosts, wanted.backend, has_mpi=here is not None and here.has_mpi, has_cuda=has_cuda())
        report.backend = choice.backend
    except UserError as mistake:
        told += [MachineFinding("refuse", None, fault.sentence) for fault in mistake.faults]
    return told


def _measure(
    report: MachineReport, hosts: HostsFile, probes: Sequence[Probe], progress: CheckProgress
) -> list[MachineFinding]:
    if len(probes) < 2:
        return []
    for probe in probes:
        progress.reached(probe.rank, "measuring", None)
    try:
        report.link = link_speed(hosts, report.backend, probes, progress.check)
    except NotReached as problem:
        return [MachineFinding("refuse", None, str(problem))]
    return []


def _findings(report: MachineReport, wanted: Wanted) -> list[MachineFinding]:
    is_hub_id = (
        bool(wanted.model) and not is_folder(user_path(wanted.model, "model")) and not Path(wanted.model).is_absolute()
    )
    return findings_of(report, wanted.model, is_hub_id)


# ── planned machines ─────────────────────────────────────────────────────────────────────────────────────────────────

# Which machines a run's settings name, checked as far as this machine can tell; and whether they answer, right before
# a run starts.


@dataclass(frozen=True, slots=True)
class PlannedMachines:
    """The machines of a hosts file in the order of their ranks, and how they communicate."""

    hosts: HostsFile
    choice: BackendChoice
    file: Path

    @property
    def notes(self) -> list[str]:
        """Sentences for the event log."""
        return [self.choice.why] if len(self.hosts.hosts) > 1 else []


def plan_machines(config: Config) -> PlannedMachines:
    """The machines of a run, without asking any of them. Raises UserError for a hosts file that cannot be used, and for a backend that the
    file or this machine lacks something for."""
    file = Path(config.hosts)
    hosts = read_hosts(file)
    if fault := fault_of_first(hosts, file.name):
        raise UserError([fault])
    choice = choose_backend(hosts, config.distributed_backend, has_mpi=mpirun() is not None, has_cuda=has_cuda())
    return PlannedMachines(_by_machine(hosts) if choice.backend == "mpi" else hosts, choice, file)


def check_machines_answer(planned: PlannedMachines, config: Config) -> list[str]:
    """Reach every machine, and look for the program, its version and the model there. → sentences for the event log. Raises UserError with
    everything that would keep the run from starting."""
    wanted = Wanted(planned.choice.backend, config.model, config.reward_functions_file)
    report = require_machines(planned.hosts, planned.file.name, wanted)
    return [finding.sentence for finding in report.findings if finding.level == "warn"]


def require_one_machine(config: Config, what: str) -> None:
    """Raise UserError where a hosts file is set for something that runs on one machine. `what` begins the sentence."""
    if config.hosts:
        raise UserError("hosts", f"{what} trains on this machine alone; take the hosts file out of the settings.")


def _by_machine(hosts: HostsFile) -> HostsFile:
    """With the entries of each machine together, as mpirun numbers its ranks."""
    places = ["" if hosts.is_here(rank) else host.ssh for rank, host in enumerate(hosts.hosts)]
    order = sorted(range(len(places)), key=lambda rank: places.index(places[rank]))
    return replace(hosts, hosts=tuple(hosts.hosts[rank] for rank in order))
