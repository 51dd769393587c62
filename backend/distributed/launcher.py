"""Starts the ranks of a run, waits for rank 0, the trainer, and leaves nothing running on any machine. It passes stop
signals on, ends the event log where rank 0 was killed, and starts all ranks again after a GPU error, or without a lost
machine (`on_lost_rank: go_on`). Every process has its own session: Ctrl-C reaches the launcher alone; workers end with
their stdin. `mlx.launch` would not do: it ends every rank as soon as one fails, before rank 0 has saved."""

import contextlib
import ctypes.util
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from backend.distributed import ranks
from backend.distributed.hosts_file import Host, HostsFile
from backend.runs.events import ENDINGS, EventLog, event_ends
from backend.runs.run_folder import RunFolder, hold_lock
from backend.trainer import control
from backend.trainer.machine import GPU_TIMEOUT_VARIABLE
from backend.utils.command import BUNDLED_PROGRAM, backend_command, backend_environment, is_bundled
from backend.utils.disk import replace_file, writing
from backend.utils.errors import UserError
from backend.utils.files import last_line, make_private_folder
from backend.utils.places import project_root
from backend.utils.text import quote

POLL_S = 0.2
MEETING_S = 120.0  # seconds for the ranks until all are connected
ENDING_S = 25.0  # seconds to save and end after a loss
EXITING_S = 10.0  # seconds to end after reporting an exit code
LEAVING_S = {True: 8.0, False: 1.0}  # seconds for workers to end, by success
MPI_PATIENCE_S = 3.0
RESUMED = "The run goes on from its last checkpoint when it is resumed."
CONNECT_S = 8
SSH_OPTIONS = shlex.split(
    f"-T -o BatchMode=yes -o ConnectTimeout={CONNECT_S} -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "
    "-o LogLevel=ERROR"
)
MPI_OPTIONS = shlex.split(  # rank 0 outlives another rank, waiting ranks yield their core, large sums go round a ring
    "--quiet --enable-recovery --mca mpi_yield_when_idle 1 --mca plm_rsh_args '-o BatchMode=yes' "
    "--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 4"
)
FIRST_PORT, PORTS = 20_000, 10_000  # below those that systems hand out
LIBRARY_VARIABLE = "MLX_MPI_LIBNAME"
_USUAL_FOLDERS = ("/opt/homebrew/bin", "/usr/local/bin", "/opt/local/bin")  # a Mac app lacks these in its PATH

_UNDER_MPI = """
rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-$PMI_RANK}}; logs=$1; name=$2; shift 2
if [ "$rank" != 0 ]; then
  if [ -d "$logs" ]; then
    log=$logs/rank-$rank.log; export GRPO_STUDIO_RANK_LOG="${logs##*/}/rank-$rank.log in the run folder"
  else log=${TMPDIR:-/tmp}/$name-rank-$rank.log; export GRPO_STUDIO_RANK_LOG=$log; fi
  exec > "$log" 2>&1 < /dev/null
fi
exec 2>&1 "$@"
"""
"""For sh under mpirun: worker output goes to a file. Arguments: log folder on rank 0's machine, run name, program."""


def rank_program(host: Host, verb: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """`python -m backend VERB …` on a machine, and the variables with which it finds our packages there."""
    if Path(host.program).name == BUNDLED_PROGRAM or (is_bundled() and not host.program):
        return [host.program or backend_command(verb)[0], verb, *arguments], {}
    is_checkout = bool(host.folder) or not (project_root() / "__init__.py").exists()
    module = "backend" if is_checkout else "grpo_studio.backend"
    variables = {"PYTHONPATH": host.folder or str(project_root())} if is_checkout else {}
    return [host.program or sys.executable, "-P", "-m", module, verb, *arguments], variables


def ssh_command(host: Host, program: list[str], variables: Mapping[str, str]) -> list[str]:
    """Command that runs a program on another machine without questions, as long as the connection lives. ~/ at the
    beginning of a word is the home folder there."""
    words = [*(f"{name}={value}" for name, value in variables.items()), *program]
    quoted = (f'"$HOME"/{shlex.quote(word[2:])}' if word.startswith("~/") else shlex.quote(word) for word in words)
    return ["ssh", *SSH_OPTIONS, host.ssh, f"exec env {' '.join(quoted)}"]


def launch_command(hosts: HostsFile, file: Path, backend: str, run: Path) -> list[str]:
    """Command to start all ranks alike by hand: `mlx.launch`, or mpirun, as Open MPI 4 refuses an mlx.launch option."""
    program, variables = rank_program(Host(""), "rank", "--run", str(run))
    ours = [f"{name}={value}" for name, value in variables.items()]
    if backend == "mpi":
        return mpi_command("mpirun", hosts, [*ours, *hosts.envs], program)
    script = Path(sys.executable).with_name("mlx.launch")
    launch = str(script) if script.exists() else script.name
    exported = [part for variable in ours for part in ("--env", variable)]
    return [launch, "--hostfile", str(file), "--backend", backend, *exported, "--", *program]


def mpi_command(mpirun: str, hosts: HostsFile, variables: Iterable[str], program: Sequence[str]) -> list[str]:
    """Command that starts all ranks with mpirun. `variables`: NAME=value."""
    slots = Counter("localhost" if hosts.is_here(rank) else host.ssh for rank, host in enumerate(hosts.hosts))
    machines = ",".join(f"{name}:{count}" for name, count in slots.items())
    exported = [part for variable in variables for part in ("-x", variable)]
    return [mpirun, "-np", str(len(hosts.hosts)), "--host", machines, *MPI_OPTIONS, *exported, *program]


def free_port(hosts: HostsFile) -> int:
    """The first of enough consecutive free ports, one for each address. Raises OSError."""
    count = max(1, sum(len(host.ips) for host in hosts.hosts))
    for _ in range(100):
        first = random.randrange(FIRST_PORT, FIRST_PORT + PORTS - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + count):
                probes.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)).bind(("", port))
            return first
    raise OSError("no ports are free on this machine")


def mlx_environment(hosts: HostsFile, backend: str, rank: int, port: int) -> dict[str, str]:
    """The environment in which MLX finds the other ranks, as `mlx.launch` sets it; files that its variables name are in
    FILES_VARIABLE. `port`: the first port."""
    variables = {name: value for name, _, value in (entry.partition("=") for entry in hosts.envs)}
    files: dict[str, str] = {}
    if backend != "mpi":
        variables["MLX_RANK"] = str(rank)
    first = hosts.hosts[0].ips[0] if hosts.hosts[0].ips else "127.0.0.1"
    if backend == "ring":
        # Each rank's addresses; the ports differ also where ranks share a machine.
        ports = itertools.count(port)
        rows = [[f"{address}:{next(ports)}" for address in host.ips] for host in hosts.hosts]
        files["MLX_HOSTFILE"] = json.dumps(rows)
    elif backend in ("jaccl", "jaccl-ring"):
        variables["MLX_JACCL_COORDINATOR"] = f"{first}:{port}"
        if backend == "jaccl-ring":
            variables["MLX_JACCL_RING"] = "1"
        files["MLX_IBV_DEVICES"] = json.dumps([host.rdma for host in hosts.hosts])
    elif backend == "nccl":
        before = sum(host.ssh == hosts.hosts[rank].ssh for host in hosts.hosts[:rank])
        variables |= {"NCCL_HOST_IP": first, "NCCL_PORT": str(port)}
        variables |= {"MLX_WORLD_SIZE": str(len(hosts.hosts)), "CUDA_VISIBLE_DEVICES": str(before)}
    return variables | {ranks.FILES_VARIABLE: json.dumps(files)}


def mpirun() -> str | None:
    """The path of mpirun; None where Open MPI is not installed."""
    return shutil.which("mpirun") or shutil.which("mpirun", path=os.pathsep.join(_USUAL_FOLDERS))


def mpi_variables() -> dict[str, str]:
    """The variable with which MLX finds the MPI library: on a Mac its path, elsewhere its name."""
    if sys.platform == "darwin" and (program := mpirun()) is not None:
        name = max(map(str, Path(program).parent.parent.glob("lib/libmpi.*dylib")), default=None)
    else:
        name = ctypes.util.find_library("mpi")
    name = os.environ.get(LIBRARY_VARIABLE) or name
    return {LIBRARY_VARIABLE: name} if name else {}


@dataclass(frozen=True, slots=True)
class LaunchEnd:
    """The end of one start. `sentence`: the reason, where rank 0 has not logged it."""

    kind: Literal["finished", "stopped", "failed", "restart"]
    exit_code: int
    sentence: str = ""
    lost_rank: int | None = None


def run_ranks(
    run: RunFolder, hosts: HostsFile, backend: str, orders: ranks.Orders, options: Sequence[str] = ()
) -> LaunchEnd:
    """Start the ranks until the run ends. `options`: of the verb `rank`. At a stop rank 0 saves. Raises DiskError."""
    requests: list[int] = []
    with tempfile.TemporaryDirectory(prefix="grpo-studio-launch-") as folder, control.handlers_restored() as afterwards:
        control.on_stop_signals(lambda number, frame: requests.append(number))
        control.unblock_stop_signals()
        orders = replace(orders, report_file=str(Path(folder, "report.json")))
        while (end := _Start(run, hosts, backend, orders, options, requests).until_ended()).kind == "restart":
            if requests:
                name = signal.Signals(requests[0]).name
                end = LaunchEnd("stopped", 3, f"Stopped at its last checkpoint because {name} was received.")
                break
            # The run has begun: its event log needs nothing but the reason of the new start.
            orders = replace(orders, is_checked=True, notes=[], warnings=[])
            if end.lost_rank is not None:
                hosts = hosts.without(end.lost_rank)
                orders = replace(orders, warnings=[f"{end.sentence} The run goes on without it."])
        afterwards.process_ends = True
        if end.sentence:
            write_late_ending(run, end.kind, end.sentence)
        return end


def write_late_ending(run: RunFolder, kind: str, sentence: str) -> None:
    """End an unended event log, unless another process trains the run."""
    try:
        lock = hold_lock(run)
    except UserError:
        return
    try:
        events = event_ends(run.events)
        if not events or events[-1]["kind"] not in ENDINGS:
            step = max((int(event["step"]) for event in events if event["kind"] == "step"), default=0)
            event_log = EventLog(run.events)
            event_log.write(kind, step=step, reason=kind, sentence=sentence)
            event_log.close()
    finally:
        os.close(lock)


@dataclass
class _Start:
    run: RunFolder
    hosts: HostsFile
    backend: str
    orders: ranks.Orders
    options: Sequence[str]
    requests: Sequence[int]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict[int, "subprocess.Popen[bytes]"])
    """Of each rank; under mpirun only mpirun's."""
    deadline: float | None = None  # when rank 0 is killed (monotonic)
    why: str = ""

    @property
    def logs(self) -> Path:
        return self.run.path / "ranks"

    @property
    def is_by_mpi(self) -> bool:
        return self.backend == "mpi" and len(self.hosts.hosts) > 1

    def until_ended(self) -> LaunchEnd:
        replace_file(Path(self.orders.report_file), "{}")
        with writing(self.logs):
            make_private_folder(self.logs)
        exit_code = 1
        try:
            try:
                port = free_port(self.hosts)
                for rank in range(1 if self.is_by_mpi else len(self.hosts.hosts)):
                    self.start(rank, port)
            except OSError as error:
                return LaunchEnd("failed", 2, f"The ranks could not be started: {error.strerror or error}.")
            self.wait()
            end = self.end()
            exit_code = end.exit_code
            return end
        finally:
            self.end_processes(LEAVING_S[exit_code == 0])

    def start(self, rank: int, port: int) -> None:
        host, backend = self.hosts.hosts[rank], self.backend if len(self.hosts.hosts) > 1 else ""
        command, variables = rank_program(host, "rank", "--run", str(self.run.path), *self.options)
        variables |= mlx_environment(self.hosts, backend or "mpi", rank, port)
        variables |= {ranks.BACKEND_VARIABLE: backend} if backend else {}
        if rank:
            variables |= {ranks.WATCH_VARIABLE: "1", ranks.LOG_VARIABLE: f"ranks/rank-{rank}.log in the run folder"}
        else:
            variables |= {ranks.ORDERS_VARIABLE: self.orders.encoded(), ranks.ADDRESSES_VARIABLE: ",".join(host.ips)}
        environment = backend_environment() | variables
        relaxed = os.environ.get(GPU_TIMEOUT_VARIABLE)
        away = variables | {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        away |= {GPU_TIMEOUT_VARIABLE: relaxed} if relaxed else {}
        if self.is_by_mpi:
            exported = [f"{name}={value}" for name, value in (away | mpi_variables()).items()]
            shell = ["/bin/sh", "-c", _UNDER_MPI, "rank", str(self.logs), self.run.name, *command]
            command = mpi_command(mpirun() or "mpirun", self.hosts, exported, shell)
            environment = backend_environment()
        elif not self.hosts.is_here(rank):
            command = ssh_command(host, command, away | {ranks.MACHINE_VARIABLE: host.ssh})
            environment = dict(os.environ)
        sys.stdout.flush()
        with contextlib.ExitStack() as logs:
            stdin, stdout, stderr = subprocess.DEVNULL, None, None
            if rank:
                log = logs.enter_context(self.log(rank).open("wb"))
                stdin, stdout, stderr = subprocess.PIPE, log, subprocess.STDOUT
            elif self.is_by_mpi:
                stderr = logs.enter_context((self.logs / "mpirun.log").open("wb"))
            self.processes[rank] = subprocess.Popen(
                command, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
            )

    def wait(self) -> None:
        meets_until = time.monotonic() + MEETING_S
        ended: set[int] = set()
        passed_on = 0
        while self.processes[0].poll() is None:
            report = self.orders.reported()
            has_met = report.get("met", False)
            failed = [rank for rank, each in self.processes.items() if rank not in ended and each.poll()]
            ended.update(failed)
            new, passed_on = self.requests[passed_on:], len(self.requests)
            if not has_met:
                if time.monotonic() > meets_until:
                    self.why = f"The ranks did not connect within {MEETING_S:.0f} seconds{self.last_words()}."
                for rank in failed:
                    words, code = last_line(self.log(rank)), self.processes[rank].returncode
                    how = f": {quote(words, 120)}" if words else f" (exit code {code})."
                    self.why = f"{self.hosts.label(rank)} ended before the run began{how}"
                if new or self.why:
                    return
            for number in new:
                self.signal_leader(number)
            for rank in failed:  # rank 0 finds out by itself, unless it is stopped
                code = self.processes[rank].returncode
                why = f"The process on {self.hosts.label(rank)} ended (exit code {code})."
                silent = "Rank 0 did not answer the other machines, and was ended."
                self.expect_end(silent if code == ranks.LEADER_LOST else why)
                self.signal_leader(signal.SIGCONT)  # it can then save and end by itself
            if "exit_code" in report:  # all is written: nothing is lost if it hangs now
                self.expect_end("", EXITING_S)
            elif "lost" in report:
                self.expect_end(report["lost"][1])
            if self.deadline is not None and time.monotonic() > self.deadline:
                return
            time.sleep(POLL_S)

    def expect_end(self, why: str, within_s: float = ENDING_S) -> None:
        if self.deadline is None:
            self.deadline, self.why = time.monotonic() + within_s, why

    def leader_pid(self) -> int | None:
        return self.orders.reported().get("pid") if self.is_by_mpi else self.processes[0].pid

    def signal_leader(self, number: int) -> None:
        if (pid := self.leader_pid()) is not None and self.processes[0].poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def last_words(self) -> str:
        logs = [(self.hosts.label(rank), self.log(rank)) for rank in range(1, len(self.hosts.hosts))]
        for name, log in [*logs, ("mpirun", self.logs / "mpirun.log")]:
            if words := last_line(log):
                return f"; {name} says: {quote(words, 100)}"
        return ""

    def end(self) -> LaunchEnd:
        report = self.orders.reported()
        rank, sentence = report.get("lost", (None, ""))
        # mpirun's own exit code says nothing of rank 0's.
        code: int | None = report.get("exit_code", None if self.is_by_mpi else self.processes[0].returncode)
        if code == ranks.RESTART_RANKS:
            return LaunchEnd("restart", code, sentence, rank)
        if code is not None and code >= 0:
            return LaunchEnd("finished" if code == 0 else "stopped" if code == 3 else "failed", code)
        if self.requests:
            name = signal.Signals(self.requests[0]).name
            return LaunchEnd("stopped", 3, f"Stopped before it had begun, because {name} was received.")
        if self.processes[0].poll() is None:  # it is killed now, and this is why
            return LaunchEnd("failed", 2, f"{self.why} {RESUMED}", rank)
        if self.is_by_mpi and not report.get("met"):
            return LaunchEnd("failed", 2, f"mpirun ended before the run began{self.last_words()}.")
        how = f" (signal {-code})" if code is not None else ""
        return LaunchEnd("failed", 2, f"The process of rank 0, on this machine, was killed{how}. {RESUMED}")

    def end_processes(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        if self.is_by_mpi and self.processes and self.processes[0].poll() is None:
            self.processes[0].terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[0].wait(MPI_PATIENCE_S)
            if (pid := self.leader_pid()) is not None:
                _kill_group(pid)
        for process in self.processes.values():
            if process.poll() is None:
                _kill_group(process.pid)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
