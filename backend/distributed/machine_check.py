"""The check of several machines: compares their facts, copies a model on request, and measures their link.

`check_machines` serves the verb `machines` and the window; `require_machines` a run that is about to start. Every wait
has a limit, and no process is left.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from backend.config.config import Config
from backend.distributed import PROBE
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
from backend.utils.child_process import ChildEnded, ChildProcess, ChildTimeout
from backend.utils.command import backend_environment
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import is_folder, user_path
from backend.utils.hub_cache import local_folder, own_file
from backend.utils.text import quote

FACTS_S = 45.0
"""Seconds for a machine to answer."""
LINK_S = 45.0
"""Seconds for a measurement; Wi-Fi takes 20."""
GRACE_S = 2.0
STALLED_S = 30.0
"""Seconds without progress of a copy."""
POLL_S = 0.2
OF_SSH = 255
"""ssh's own exit code."""
_SSH_HINTS = {
    "Permission denied": "refuses your key. Put it there with: ssh-copy-id {ssh}",
    "Host key verification failed": "is not known to ssh yet. Connect once by hand: ssh {ssh}",
    "Connection refused": "accepts no ssh. Turn on Remote Login there (System Settings, General, Sharing).",
    "timed out": "does not answer. It may be asleep, switched off, or on another network.",
}
"""ssh's words → rest of a sentence."""
_UNPACK = 'mkdir -p "$1" && tar -xf - -C "$1" && mv "$1/$2.part" "$1/$2"'
"""Unpacks a model; config.json comes last."""

Stage = Literal["reading", "read", "copying", "measuring"]


class NotReachedError(Exception):
    """A machine or link does not do what a run needs; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The subject of a check."""

    backend: str = AUTO
    """The setting `distributed_backend`."""
    model: str = ""
    reward_file: str = ""
    copies: bool = False


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """Receives the progress of a check, from several threads."""

    reached: Callable[[int, Stage, float | None], None] = lambda rank, stage, share: None
    """(rank, stage, share of a copy)."""
    check: Callable[[], None] = lambda: None
    """Raises to give up."""


def check_machines(
    hosts: HostsFile, name: str, wanted: Wanted, progress: CheckProgress = CheckProgress()
) -> MachineReport:
    """The whole check. `name`: the hosts file's. Raises what `progress.check` raises."""
    report = _empty_report(hosts)
    ranks = range(len(hosts.hosts))
    _read_facts(report, hosts, ranks, wanted, progress)
    if wanted.copies:
        lacking = {hosts.hosts[rank].ssh: rank for rank in reversed(report.without_model)}
        for rank in sorted(lacking.values()):  # one after the other: they share this machine's connection
            copy_model(wanted.model, hosts, rank, progress)
        _read_facts(report, hosts, ranks, wanted, progress)
    refusals = _choose(report, hosts, name, wanted)
    if not refusals and len(ranks) > 1 and all(machine.facts is not None for machine in report.machines):
        try:
            report.link = _link_speed(report, hosts, progress)
        except NotReachedError as problem:
            refusals = [MachineFinding("refuse", None, str(problem))]
    report.findings = [*refusals, *_findings(report, wanted)]
    return report


def require_machines(hosts: HostsFile, name: str, wanted: Wanted) -> MachineReport:
    """The facts of every machine. Raises UserError with everything that would keep a run from starting."""
    report = _empty_report(hosts)
    first_of = {machine.ssh: machine.rank for machine in reversed(report.machines) if not machine.is_here}
    _read_facts(report, hosts, sorted(first_of.values()), wanted, CheckProgress())
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


def _ask(hosts: HostsFile, rank: int, request: dict[str, Any], timeout_s: float, poll: Callable[[], None]) -> Any:
    host, is_here = hosts.hosts[rank], hosts.is_here(rank)
    name = "This machine" if is_here else quote(host.ssh, 40)
    program, variables = rank_program(host, PROBE), program_environment(host)
    command = program if is_here else ssh_command(host, program, variables)
    environment = backend_environment() if is_here else dict(os.environ)
    child = ChildProcess(command, grace_s=GRACE_S, environment=environment, marker=MARKER)
    try:
        answer = child.request(request, timeout_s, poll)
    except ChildTimeout:
        raise NotReachedError(f"{name} has not answered for {timeout_s:.0f} s.") from None
    except ChildEnded as ended:
        raise NotReachedError(f"{name} {_why(ended, host, is_here)}") from None
    except (json.JSONDecodeError, OSError) as error:
        raise NotReachedError(f"{name} could not be asked: {quote(error)}.") from None
    finally:
        child.stop()
    if "error" in answer:
        raise NotReachedError(f"{name} reports: {quote(answer['error'], 120)}")
    return answer


def _why(ended: ChildEnded, host: Host, is_here: bool) -> str:
    last = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.exit_code}"]
    if ended.exit_code == OF_SSH and not is_here:
        hints = (rest.format(ssh=host.ssh) for words, rest in _SSH_HINTS.items() if words in ended.stderr)
        return next(hints, f"was not reached within {CONNECT_S} s: {quote(last[0], 100)}.")
    if ended.exit_code in (126, 127):  # the shell's, for a program that cannot be run, or is not there
        missing = quote(host.program, 80) if host.program else "Python where this machine has its own"
        return f"has no {missing}. Install GRPO Studio there, or name its program in the hosts file."
    if "No module named" in ended.stderr or "No such command" in ended.stderr:
        return "has no GRPO Studio, or an older one. Name its program or folder in the hosts file."
    return f"could not start GRPO Studio: {quote(last[0], 110)}."


def _in_parallel(work: Callable[[int], None], ranks: Sequence[int]) -> None:
    with ThreadPoolExecutor(len(ranks) or 1, thread_name_prefix="machine") as threads:
        list(threads.map(work, ranks))


def _read_facts(
    report: MachineReport, hosts: HostsFile, ranks: Sequence[int], wanted: Wanted, progress: CheckProgress
) -> None:
    request = {"ask": "facts", "model": wanted.model, "reward_file": wanted.reward_file}

    def read(rank: int) -> None:
        machine = report.machines[rank]
        progress.reached(rank, "reading", None)
        try:
            answer = _ask(hosts, rank, request, FACTS_S, progress.check)
            known = {key: value for key, value in answer.items() if key in MachineFacts.__slots__}
            machine.facts, machine.problem = MachineFacts(**known), ""
        except NotReachedError as problem:
            machine.problem = str(problem)
        progress.reached(rank, "read", None)

    _in_parallel(read, ranks)


def _choose(report: MachineReport, hosts: HostsFile, name: str, wanted: Wanted) -> list[MachineFinding]:
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


def _link_speed(report: MachineReport, hosts: HostsFile, progress: CheckProgress) -> LinkSpeed | None:
    backend, ranks = report.backend, list(range(len(hosts.hosts)))
    if backend == "mpi":
        ranks = [0, next((each.rank for each in report.machines if not each.is_here), 1)]
        backend, hosts = "ring", HostsFile(tuple(hosts.hosts[rank] for rank in ranks))
        if not all(host.ips for host in hosts.hosts):
            return None
    port = FIRST_PORT + random.randrange(PORTS)
    speeds, problems = list[LinkSpeed](), list[str]()

    def poll() -> None:
        progress.check()
        if problems:
            raise NotReachedError("another rank has failed, so this one's answer would never come")

    def measure(rank: int) -> None:
        progress.reached(ranks[rank], "measuring", None)
        variables, files = mlx_environment(hosts, backend, rank, port)
        request = {"ask": "link", "backend": backend, "variables": variables, "files": files}
        try:
            speeds.append(LinkSpeed(**_ask(hosts, rank, request, LINK_S, poll)))
        except NotReachedError as problem:
            problems.append(str(problem))

    _in_parallel(measure, range(len(ranks)))
    if problems:
        advice = "A firewall may be between them, or an address in the hosts file wrong."
        raise NotReachedError(f"The machines could not sum over {backend}. {problems[0]} {advice}")
    if (found := min(speed.ranks for speed in speeds)) != len(ranks):
        raise NotReachedError(f"Only {found} of {len(ranks)} ranks have found each other over {backend}.")
    slowest = min(speed.bytes_per_second for speed in speeds)
    return LinkSpeed(max(speed.latency_s for speed in speeds), slowest, len(ranks))


class _CountingWriter(io.RawIOBase):
    def __init__(self, stream: Any) -> None:
        self.stream, self.count = stream, 0

    def write(self, data: Any) -> int:
        self.count += self.stream.write(data)
        return len(data)


def copy_model(model: str, hosts: HostsFile, rank: int, progress: CheckProgress = CheckProgress()) -> None:
    """Send a model to another machine, as tar over ssh. Raises UserError; what has arrived stays."""
    host, label = hosts.hosts[rank], hosts.label(rank)
    folder, files = local_folder(model), model_files(model)
    total = sum(files.values())
    if folder is None or not files:
        raise UserError("model", f"The model {quote(model)} is not on this machine, so it cannot be copied to {label}.")
    if total > COPY_LIMIT:
        raise UserError("model", f"The model {quote(model)} is larger than the {COPY_LIMIT:,} bytes that are copied.")
    for name in files:
        own_file(folder / name, folder, "model")
    revision = "" if is_folder(user_path(model, "model")) else folder.name  # of a snapshot in the cache
    try:
        request = {"ask": "place", "model": model, "revision": revision, "names": [*files], "bytes": total}
        place = _ask(hosts, rank, request, FACTS_S, progress.check)["folder"]
    except NotReachedError as problem:
        raise UserError("model", f"{label} could not take the model: {problem}") from None
    inside = f"snapshots/{revision}/" if revision else ""
    unpack = ["/bin/sh", "-c", _UNPACK, "sh", place, f"{inside}config.json"]
    process = subprocess.Popen(
        ssh_command(host, unpack, {}), stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stderr is not None
    sent = _CountingWriter(process.stdin)

    def send() -> None:
        try:
            with sent.stream, tarfile.open(fileobj=sent, mode="w|", dereference=True, bufsize=1 << 20) as archive:
                if revision:
                    ref = tarfile.TarInfo("refs/main")
                    ref.size = len(revision)
                    archive.addfile(ref, io.BytesIO(revision.encode()))
                for name in sorted(files, key=lambda name: name == "config.json"):
                    archive.add(folder / name, inside + name + (".part" if name == "config.json" else ""))
        except (OSError, ValueError):
            pass  # the other end's words say why

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    try:
        count, moved = 0, time.monotonic()
        while sending.is_alive() or process.poll() is None:
            progress.check()
            progress.reached(rank, "copying", min(sent.count / total, 1.0))
            count, moved = sent.count, moved if sent.count == count else time.monotonic()
            if time.monotonic() - moved > STALLED_S:
                raise UserError("model", f"The copy of the model has stalled: nothing was taken for {STALLED_S:.0f} s.")
            sending.join(POLL_S)
            if not sending.is_alive() and process.poll() is None:
                time.sleep(POLL_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        last = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        raise UserError(
            "model", f"{label} could not take the model: {quote(last[0] if last else 'ssh has ended', 110)}"
        )


@dataclass(frozen=True, slots=True)
class PlannedMachines:
    """The machines in rank order, and their backend."""

    hosts: HostsFile
    choice: BackendChoice
    file: Path

    @property
    def notes(self) -> list[str]:
        """For the event log."""
        return [self.choice.why] if len(self.hosts.hosts) > 1 else []


def plan_machines(config: Config) -> PlannedMachines:
    """The machines of a run, without contacting any. Raises UserError."""
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


def check_machines_answer(planned: PlannedMachines, config: Config) -> Sequence[str]:
    """Check every machine before a run. → warnings for the event log. Raises UserError."""
    wanted = Wanted(planned.choice.backend, config.model, config.reward_functions_file)
    report = require_machines(planned.hosts, planned.file.name, wanted)
    return [finding.sentence for finding in report.findings if finding.level == "warn"]


def require_one_machine(config: Config, what: str) -> None:
    """Raise UserError where a hosts file is set; `what` begins the sentence."""
    if config.hosts:
        raise UserError("hosts", f"{what} trains on this machine alone; take the hosts file out of the settings.")
