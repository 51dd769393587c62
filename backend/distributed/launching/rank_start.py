"""The processes of a run's ranks as a launcher starts them: here, over ssh, or by mpirun. Each tells its process id in a line of its own.

Every process has a session of its own: Ctrl-C in the launcher's terminal reaches the launcher alone, which asks rank 0 to stop and
save. Workers find the end of their stdin when the launcher is gone, however it has ended, and end themselves.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from backend.distributed.addresses import ADDRESSES_VARIABLE
from backend.distributed.hosts_file import (
    MPI_OPTIONS,
    HostsFile,
    RankEnvironment,
    rank_environment,
    rank_environment_of,
    rank_program,
    ssh_command,
)
from backend.distributed.open_mpi import mpi_variables, mpirun
from backend.distributed.orders import ORDERS_VARIABLE, WATCH_VARIABLE, OrdersFolder
from backend.distributed.rank_process import BACKEND_VARIABLE, LOG_VARIABLE, MACHINE_VARIABLE
from backend.trainer.machine import GPU_TIMEOUT_VARIABLE as TIMEOUT_VARIABLE
from backend.utils.command import backend_environment

PID_LINE = re.compile(rb"grpo-studio-rank (\d+) pid (\d+)\s*")
"""The line in which a rank that the launcher does not start itself tells its process id."""

_REMOTE = """
while [ "$1" != -- ]; do
  f=$(mktemp) || exit 1; printf %s "$2" > "$f"; export "$1=$f" "GRPO_STUDIO_OWN_FILES=$GRPO_STUDIO_OWN_FILES $1"; shift 2
done; shift
echo "grpo-studio-rank $MLX_RANK pid $$"; exec "$@"
"""
"""For sh on another machine: arguments are pairs of a variable and the content of the file that it is to name, then --, then the program."""

_UNDER_MPI = """
rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-$PMI_RANK}}; echo "grpo-studio-rank $rank pid $$"; logs=$1; name=$2; shift 2
if [ "$rank" != 0 ]; then
  if [ -d "$logs" ]; then log=$logs/rank-$rank.log; export GRPO_STUDIO_RANK_LOG="${logs##*/}/rank-$rank.log in the run folder"
  else log=${TMPDIR:-/tmp}/$name-rank-$rank.log; export GRPO_STUDIO_RANK_LOG=$log; fi
  exec > "$log" 2>&1 < /dev/null
fi
exec "$@"
"""
"""For sh under mpirun, which mixes the output of all ranks: a worker's goes to a file of its own. Arguments: the folder of logs on rank 0's
machine, the run's name, then the program."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What is started: a run's ranks on the machines of `hosts`, over `backend`."""

    hosts: HostsFile
    backend: str
    run: Path
    orders: OrdersFolder
    logs: Path
    """The folder of the workers' logs, on this machine."""
    port: int
    """The first of the ports that MLX listens on."""
    options: Sequence[str] = ()
    """Of the verb `rank`, such as --stream."""

    @property
    def size(self) -> int:
        return len(self.hosts.hosts)

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def program(self, rank: int) -> list[str]:
        return rank_program(self.hosts.hosts[rank], "rank", "--run", str(self.run), *self.options)


@dataclass(slots=True)
class RankProcess:
    """A process that the launcher has started: a rank, its ssh, or the mpirun of all ranks (`rank` is None)."""

    process: subprocess.Popen[bytes]
    rank: int | None
    is_here: bool
    """Whether its process id is the rank's own."""


def start_ranks(plan: LaunchPlan) -> list[RankProcess]:
    """Start all of them; those that were started are ended again where one cannot be. Raises OSError."""
    if plan.backend == "mpi" and plan.size > 1:
        return [_start_mpi(plan)]
    started: list[RankProcess] = []
    try:
        for rank in range(plan.size):
            started.append(_start_here(plan, rank) if plan.hosts.is_here(rank) else _start_there(plan, rank))
    except BaseException:
        for each in started:
            each.process.kill()
        raise
    return started


def _start_here(plan: LaunchPlan, rank: int) -> RankProcess:
    told = _told(plan, rank)
    environment = (
        backend_environment() | rank_environment(plan.hosts.hosts[rank]) | told.variables | _own_variables(plan, rank)
    )
    for name, content in told.files.items():
        file = plan.orders.path / f"{name.lower()}.json"
        file.write_text(content, encoding="utf-8")
        environment[name] = str(file)
    if rank == 0:
        return RankProcess(_popen(plan.program(0), environment, subprocess.DEVNULL, None), 0, is_here=True)
    with plan.log(rank).open("wb") as log:
        return RankProcess(_popen(plan.program(rank), environment, subprocess.PIPE, log), rank, is_here=True)


def _start_there(plan: LaunchPlan, rank: int) -> RankProcess:
    """Over ssh, which passes on what the rank prints; whoever reads it looks for PID_LINE."""
    host, told = plan.hosts.hosts[rank], _told(plan, rank)
    variables = rank_environment(host) | told.variables | _own_variables(plan, rank) | _python_variables()
    files = [part for pair in told.files.items() for part in pair]
    words = ["/bin/sh", "-c", _REMOTE, "rank", *files, "--", *plan.program(rank)]
    command = ssh_command(host, words, variables)
    return RankProcess(_popen(command, dict(os.environ), subprocess.PIPE, subprocess.PIPE), rank, is_here=False)


def _start_mpi(plan: LaunchPlan) -> RankProcess:
    """All ranks at once. `--enable-recovery`: Open MPI would end rank 0 as soon as another rank dies, before it has saved."""
    variables = rank_environment(plan.hosts.hosts[0]) | rank_environment_of(plan.hosts, "mpi", 0, plan.port).variables
    variables |= {ORDERS_VARIABLE: str(plan.orders.path), BACKEND_VARIABLE: "mpi"}
    variables |= _addresses(plan) | _python_variables() | mpi_variables()
    slots = Counter("localhost" if plan.hosts.is_here(rank) else host.ssh for rank, host in enumerate(plan.hosts.hosts))
    command = [
        mpirun() or "mpirun", "-np", str(plan.size), "--host", ",".join(f"{name}:{n}" for name, n in slots.items()),
        "--quiet", *MPI_OPTIONS,
        *[part for name, value in variables.items() for part in ("-x", f"{name}={value}")],
        "/bin/sh", "-c", _UNDER_MPI, "rank", str(plan.logs), plan.run.name, *plan.program(0),
    ]  # fmt: skip
    return RankProcess(_popen(command, backend_environment(), subprocess.DEVNULL, subprocess.PIPE), None, is_here=False)


def _told(plan: LaunchPlan, rank: int) -> RankEnvironment:
    """MLX's environment; of a single process none, as it has nobody to meet."""
    backend = plan.backend if plan.size > 1 else "mpi"
    return rank_environment_of(plan.hosts, backend, rank, plan.port)


def _own_variables(plan: LaunchPlan, rank: int) -> dict[str, str]:
    backend = {BACKEND_VARIABLE: plan.backend} if plan.size > 1 else {}
    if rank == 0:
        return backend | {ORDERS_VARIABLE: str(plan.orders.path)} | _addresses(plan)
    name = {} if plan.hosts.is_here(rank) else {MACHINE_VARIABLE: plan.hosts.hosts[rank].ssh}
    return (
        backend
        | name
        | {WATCH_VARIABLE: "1", LOG_VARIABLE: f"{plan.logs.name}/{plan.log(rank).name} in the run folder"}
    )


def _addresses(plan: LaunchPlan) -> dict[str, str]:
    """Where rank 0 listens, if the hosts file says it."""
    addresses = plan.hosts.hosts[0].ips
    return {ADDRESSES_VARIABLE: ",".join(addresses)} if addresses else {}


def _python_variables() -> dict[str, str]:
    """What a rank on another machine has of this process's environment."""
    relaxed = {name: value for name in (TIMEOUT_VARIABLE,) if (value := os.environ.get(name))}
    return {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"} | relaxed


def _popen(
    command: list[str], environment: Mapping[str, str], stdin: int, output: IO[Any] | int | None
) -> subprocess.Popen[bytes]:
    """`output`: where both stdout and stderr go; None: where the launcher's go."""
    errors = None if output is None else subprocess.STDOUT
    sys.stdout.flush()
    return subprocess.Popen(
        command, env=dict(environment), stdin=stdin, stdout=output, stderr=errors, start_new_session=True
    )
