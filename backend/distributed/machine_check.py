"""The check of several machines: reaches each, compares their facts, copies a model on request, and measures how fast
they sum.

`check_machines` is all of it, for the verb `machines` and the window; `require_machines` the quick part, for a run that
is about to start. On every machine a process of ours answers (`backend.distributed.machine_probe`): through ssh on
others, directly here. Every wait has a limit, and the processes have ended when the functions return, or end with the
connection where it was lost.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from backend.config.config import Config
from backend.distributed import PROBE, RECEIVE
from backend.distributed.commands import (
    CONNECT_S,
    mlx_environment,
    mpirun,
    program_environment,
    rank_program,
    ssh_command,
)
from backend.distributed.hosts_file import (
    AUTO,
    BackendChoice,
    Host,
    HostsFile,
    choose_backend,
    first_host_problem,
    read_hosts,
)
from backend.distributed.launcher import FIRST_PORT, PORTS
from backend.distributed.machine_probe import MARKER, facts, has_cuda, model_files
from backend.distributed.machine_report import (
    COPY_LIMIT,
    CheckedMachine,
    LinkSpeed,
    MachineFacts,
    MachineFinding,
    MachineReport,
    findings_of,
)
from backend.utils.child_process import ChildEnded, ChildProcess, ChildTimeout, json_line
from backend.utils.command import backend_environment
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import is_folder, user_path
from backend.utils.hub_cache import local_folder
from backend.utils.own_files import own_file
from backend.utils.text import quote

FACTS_S = 45.0
"""Seconds for a machine to answer: the connection, and Python starting from a cold disk."""
LINK_S = 45.0
"""Seconds for a measurement: loading mlx, connecting, and 30 sums; over Wi-Fi about 20 s."""
GRACE_S = 2.0
STALLED_S = 30.0
"""How long a copy may make no progress."""
POLL_S = 0.2

OF_SSH = 255
"""ssh's exit code for an error of its own."""
_SSH_SAYS = (
    ("Permission denied", "refuses your key. Put it there with: ssh-copy-id {ssh}"),
    (
        "Host key verification failed",
        "is not known to ssh yet. Connect once by hand and answer its question: ssh {ssh}",
    ),
    (
        "REMOTE HOST IDENTIFICATION",
        "has another host key than the one ssh knows. If that is right, forget it: ssh-keygen -R {ssh}",
    ),
    (
        "Could not resolve",
        "is no name that this machine can resolve. Look at the hosts file, or at both machines' network.",
    ),
    ("Connection refused", "accepts no ssh. Turn on Remote Login there (System Settings, General, Sharing)."),
    ("timed out", "does not answer. It may be asleep, switched off, or on another network."),
    ("No route to host", "does not answer. It may be asleep, switched off, or on another network."),
)
"""ssh's words → the rest of a sentence that begins with the machine."""

Stage = Literal["reading", "read", "copying", "measuring"]
"""A stage of the check of a machine."""


class NotReachedError(Exception):
    """A machine, or the connection between several, does not do what a run needs; the message is a sentence."""


class _AbandonedError(Exception):
    """Another rank has failed, so this one's answer would never come."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The subject of a check."""

    backend: str = AUTO
    """The setting `distributed_backend`."""
    model: str = ""
    reward_file: str = ""
    copies: bool = False
    """Copy the model to machines that lack it."""


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """Where a check reports what it does, from several threads."""

    reached: Callable[[int, Stage, float | None], None] = lambda rank, stage, share: None
    """(rank, stage, the share that is done, of a copy)."""
    check: Callable[[], None] = lambda: None
    """Called several times a second; raises to give up."""


class Probe:
    """The process of one rank's machine."""

    def __init__(self, hosts: HostsFile, rank: int, check: Callable[[], None]) -> None:
        """`check` is called while an answer is waited for, and may raise to give up."""
        self.rank = rank
        self.abandoned = threading.Event()
        self._check, self._host, self._is_here = check, hosts.hosts[rank], hosts.is_here(rank)
        self._name = "This machine" if self._is_here else quote(self._host.ssh, 40)
        program, variables = rank_program(self._host, PROBE), program_environment(self._host)
        command = program if self._is_here else ssh_command(self._host, program, variables)
        environment = backend_environment() if self._is_here else dict(os.environ)
        self._child = ChildProcess(command, grace_s=GRACE_S, environment=environment, marker=MARKER)

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a request. Raises NotReachedError, and whatever the check raises."""
        try:
            answer = self._child.request(request, timeout_s, self._poll)
        except ChildTimeout:
            raise NotReachedError(f"{self._name} has not answered for {timeout_s:.0f} s.") from None
        except ChildEnded as ended:
            raise NotReachedError(f"{self._name} {self._why(ended)}") from None
        except (json.JSONDecodeError, OSError) as error:
            raise NotReachedError(f"{self._name} could not be asked: {quote(error)}.") from None
        if "error" in answer:
            raise NotReachedError(f"{self._name} reports: {quote(answer['error'], 120)}.")
        return answer

    def end(self) -> None:
        self._child.stop()

    def _poll(self) -> None:
        self._check()
        if self.abandoned.is_set():
            raise _AbandonedError

    def _why(self, ended: ChildEnded) -> str:
        """Why a process has ended in place of answering, to follow the machine's name."""
        said, lines = ended.stderr, [line for line in ended.stderr.splitlines() if line.strip()]
        last = lines[-1].strip() if lines else ""
        if ended.exit_code == OF_SSH and not self._is_here:
            for pattern, rest in _SSH_SAYS:
                if pattern.lower() in said.lower():
                    return rest.format(ssh=self._host.ssh)
            return f"was not reached within {CONNECT_S} s: {quote(last or 'ssh gave no reason', 100)}."
        if ended.exit_code in (126, 127):  # the shell's, for a program that cannot be run, or is not there
            missing = quote(self._host.program, 80) if self._host.program else "Python where this machine has its own"
            return f"has no {missing}. Install GRPO Studio there, or name its program in the hosts file."
        if "No module named" in said or "No such command" in said:
            advice = "Name its program or folder in the hosts file."
            return f"has no GRPO Studio, or an older one, where it was looked for. {advice}"
        return f"could not start GRPO Studio: {quote(last or str(ended), 110)}."


def in_parallel(work: Callable[[Probe], None], probes: Sequence[Probe]) -> None:
    """`work` for every probe at once. The first exception, such as a cancellation, ends the others' processes and is
    raised."""
    if not probes:
        return
    with ThreadPoolExecutor(len(probes), thread_name_prefix="machine") as threads:
        futures = [threads.submit(work, probe) for probe in probes]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            for probe in probes:
                probe.abandoned.set()
            raise


def check_machines(
    hosts: HostsFile, name: str, wanted: Wanted, progress: CheckProgress = CheckProgress()
) -> MachineReport:
    """Everything about the machines of a hosts file. `name`: the file's, for messages. Raises what `progress.check`
    raises."""
    report = _empty_report(hosts)
    with _probes(hosts, range(len(hosts.hosts)), progress) as probes:
        _read_facts(report, probes, wanted, progress)
        if wanted.copies:
            _copy(report, hosts, wanted, progress)
            _read_facts(report, probes, wanted, progress)
        refusals = _choose(report, hosts, name, wanted)
        if not refusals and len(probes) > 1 and all(machine.facts is not None for machine in report.machines):
            try:
                report.link = _link_speed(report, hosts, probes, progress)
            except NotReachedError as problem:
                refusals = [MachineFinding("refuse", None, str(problem))]
    report.findings = [*refusals, *_findings(report, wanted)]
    return report


def require_machines(
    hosts: HostsFile, name: str, wanted: Wanted, progress: CheckProgress = CheckProgress()
) -> MachineReport:
    """The facts of every machine, without copies and measurements: seconds. Raises UserError with everything that would
    keep a run from starting; the other findings are in the report."""
    report = _empty_report(hosts)
    away = [machine.rank for machine in report.machines if not machine.is_here]
    first_of = {hosts.hosts[rank].ssh: rank for rank in reversed(away)}
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
        sentences = dict.fromkeys(finding.sentence for finding in report.refusals)
        raise UserError([ConfigProblem("hosts", sentence) for sentence in sentences])
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
        except NotReachedError as problem:
            machine.problem = str(problem)
        progress.reached(probe.rank, "read", None)

    in_parallel(read, probes)


def _choose(report: MachineReport, hosts: HostsFile, name: str, wanted: Wanted) -> list[MachineFinding]:
    """Set the backend of the report. → why there is none, or why the file cannot be used."""
    found: list[MachineFinding] = []
    if problem := first_host_problem(hosts, name):
        found.append(MachineFinding("refuse", 0, problem.sentence))
    here = report.machines[0].facts
    try:
        choice = choose_backend(hosts, wanted.backend, has_mpi=here is not None and here.has_mpi, has_cuda=has_cuda())
        report.backend = choice.backend
    except UserError as error:
        found += [MachineFinding("refuse", None, problem.sentence) for problem in error.faults]
    return found


def _findings(report: MachineReport, wanted: Wanted) -> list[MachineFinding]:
    model = wanted.model
    is_hub_id = bool(model) and not is_folder(user_path(model, "model")) and not Path(model).is_absolute()
    return findings_of(report, model, is_hub_id)


def _link_speed(
    report: MachineReport, hosts: HostsFile, probes: Sequence[Probe], progress: CheckProgress
) -> LinkSpeed | None:
    """As the slowest rank measured it; with MPI between this machine and one other, over a ring. None where there is
    nothing to measure with. Raises NotReachedError, and whatever the check raises."""
    backend = report.backend
    if backend == "mpi":
        backend, other = "ring", next((each.rank for each in report.machines if not each.is_here), 1)
        probes = [probes[0], probes[other]]
        hosts = HostsFile((hosts.hosts[0], hosts.hosts[other]))
        if not all(host.ips for host in hosts.hosts):
            return None
    port = FIRST_PORT + random.randrange(PORTS)
    speeds: list[LinkSpeed] = []
    problems: list[str] = []

    def measure(probe: Probe) -> None:
        progress.reached(probe.rank, "measuring", None)
        variables, files = mlx_environment(hosts, backend, probes.index(probe), port)
        request = {"ask": "link", "backend": backend, "variables": variables, "files": files}
        try:
            speeds.append(LinkSpeed(**probe.ask(request, LINK_S)))
        except NotReachedError as problem:
            problems.append(str(problem))
            for each in probes:  # they would wait for this rank until their time is over
                each.abandoned.set()
        except _AbandonedError:
            pass

    in_parallel(measure, probes)
    if problems:
        advice = "A firewall may be between them, or an address in the hosts file wrong."
        raise NotReachedError(f"The machines could not sum over {backend}. {problems[0]} {advice}")
    if (found := min(speed.ranks for speed in speeds)) != len(probes):
        raise NotReachedError(f"Only {found} of {len(probes)} ranks have found each other over {backend}.")
    slowest = min(speed.bytes_per_second for speed in speeds)
    return LinkSpeed(max(speed.latency_s for speed in speeds), slowest, len(probes))


def _copy(report: MachineReport, hosts: HostsFile, wanted: Wanted, progress: CheckProgress) -> None:
    """Copy the model to every machine that lacks it, one after the other: they share this machine's connection."""
    lacking = {hosts.hosts[rank].ssh: rank for rank in reversed(report.without_model)}
    for rank in sorted(lacking.values()):

        def report_share(share: float, rank: int = rank) -> None:
            progress.reached(rank, "copying", share)

        copy_model(wanted.model, hosts.hosts[rank], hosts.label(rank), report_share, progress.check)


def copy_model(model: str, host: Host, label: str, report: Callable[[float], None], poll: Callable[[], None]) -> None:
    """Send a model of this machine to another, over ssh (`machine_probe.receive`). `report` gets the share that is
    sent, `poll` may raise to give up. Raises UserError, naming the machine, where it fails; what has arrived stays,
    without config.json."""
    folder, files = local_folder(model), model_files(model)
    total = sum(files.values())
    if folder is None or not files:
        raise UserError("model", f"The model {quote(model)} is not on this machine, so it cannot be copied to {label}.")
    if total > COPY_LIMIT:
        raise UserError("model", f"The model {quote(model)} is larger than the {COPY_LIMIT:,} bytes that are copied.")
    for name in files:
        own_file(folder / name, folder, "model")
    revision = "" if is_folder(user_path(model, "model")) else folder.name  # of a snapshot in the cache
    header = {"model": model, "revision": revision, "names": [*files], "bytes": total}
    process = subprocess.Popen(
        ssh_command(host, rank_program(host, RECEIVE), program_environment(host)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        sent = _CountingWriter(process.stdin)
        sending = threading.Thread(target=_send, args=(sent, header, folder, files), daemon=True)
        sending.start()
        count, moved = 0, time.monotonic()
        while sending.is_alive():
            poll()
            report(min(sent.count / total, 1.0))
            count, moved = sent.count, moved if sent.count == count else time.monotonic()
            if time.monotonic() - moved > STALLED_S:
                raise UserError("model", f"The copy of the model has stalled: nothing was taken for {STALLED_S:.0f} s.")
            sending.join(POLL_S)
        process.stdin = None
        try:
            out, err = process.communicate(timeout=STALLED_S)
        except subprocess.TimeoutExpired:
            raise UserError("model", f"{label} could not take the model: it has not answered.") from None
    finally:
        process.kill()
        process.wait()
    answers = [
        line.removeprefix(MARKER) for line in out.decode(errors="replace").splitlines() if line.startswith(MARKER)
    ]
    last = err.decode(errors="replace").strip().splitlines()[-1:] or [f"ssh ended with exit code {process.returncode}."]
    if problem := json.loads(answers[0]).get("error", "") if answers else last[0]:
        raise UserError("model", f"{label} could not take the model: {quote(problem, 110)}")


class _CountingWriter:
    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.count = stream, 0

    def write(self, data: bytes) -> int:
        self.count += self.stream.write(data)
        return len(data)


def _send(out: _CountingWriter, header: dict[str, Any], folder: Path, files: dict[str, int]) -> None:
    """Ends early where the receiver has ended: its answer says why."""
    try:
        out.write(json_line(header).encode())
        with tarfile.open(fileobj=out, mode="w|", dereference=True, bufsize=1 << 20) as archive:  # pyright: ignore
            for name in sorted(files, key=lambda name: name == "config.json"):
                archive.add(folder / name, name)
        out.stream.close()
    except (OSError, ValueError):
        pass


@dataclass(frozen=True, slots=True)
class PlannedMachines:
    """The machines of a hosts file in the order of their ranks, and how they communicate."""

    hosts: HostsFile
    choice: BackendChoice
    file: Path

    @property
    def notes(self) -> list[str]:
        """For the event log."""
        return [self.choice.why] if len(self.hosts.hosts) > 1 else []


def plan_machines(config: Config) -> PlannedMachines:
    """The machines of a run, without asking any of them. Raises UserError for a hosts file that cannot be used, and for
    a backend that the file or this machine lacks something for."""
    file = Path(config.hosts)
    hosts = read_hosts(file)
    if problem := first_host_problem(hosts, file.name):
        raise UserError([problem])
    choice = choose_backend(hosts, config.distributed_backend, has_mpi=mpirun() is not None, has_cuda=has_cuda())
    if choice.backend == "mpi":  # the entries of each machine together, as mpirun numbers its ranks
        places = ["" if hosts.is_here(rank) else host.ssh for rank, host in enumerate(hosts.hosts)]
        order = sorted(range(len(places)), key=lambda rank: places.index(places[rank]))
        hosts = replace(hosts, hosts=tuple(hosts.hosts[rank] for rank in order))
    return PlannedMachines(hosts, choice, file)


def check_machines_answer(planned: PlannedMachines, config: Config) -> list[str]:
    """Reach every machine, and look for the program, its version and the model there. → warnings for the event log.
    Raises UserError with everything that would keep the run from starting."""
    wanted = Wanted(planned.choice.backend, config.model, config.reward_functions_file)
    report = require_machines(planned.hosts, planned.file.name, wanted)
    return [finding.sentence for finding in report.findings if finding.level == "warn"]


def require_one_machine(config: Config, what: str) -> None:
    """Raise UserError where a hosts file is set for something that runs on one machine. `what` begins the sentence."""
    if config.hosts:
        raise UserError("hosts", f"{what} trains on this machine alone; take the hosts file out of the settings.")
