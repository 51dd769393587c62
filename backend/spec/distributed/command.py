"""The commands of a run on several machines: a rank's program on its machine, and the line to start all by hand."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from backend.spec.command import BUNDLED_PROGRAM, backend_command, is_bundled
from backend.spec.distributed.hosts_file import Host, HostsFile
from backend.spec.places import project_root

CONNECT_S = 8
"""Seconds that ssh may take to connect."""
SSH_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
    "-o", "LogLevel=ERROR",
)  # fmt: skip

MPI_OPTIONS = (
    "--enable-recovery", "--mca", "mpi_yield_when_idle", "1", "--mca", "plm_rsh_args", "-o BatchMode=yes",
    "--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4",
)  # fmt: skip
"""Of mpirun: rank 0 outlives another rank, to save; a rank that waits leaves its core to others; and large sums go round a ring, which
over a wire takes half the time of what Open MPI chooses itself (3 ranks, 4 MB, 100 Mb/s: 0.50 s and 1.14 s)."""


def rank_program(host: Host, verb: str, *arguments: str) -> list[str]:
    """Program and arguments of `python -m backend VERB …` on a machine; its `program` in place of ours, where it has one."""
    if Path(host.program).name == BUNDLED_PROGRAM:
        return [host.program, verb, *arguments]
    if not host.program and (is_bundled() or not host.folder):
        return backend_command(verb, *arguments)
    module = "backend" if host.folder or _is_checkout() else "grpo_studio.backend"
    return [host.program or sys.executable, "-P", "-m", module, verb, *arguments]


def rank_environment(host: Host) -> dict[str, str]:
    """What Python needs on that machine to find our packages: a checkout's folder; nothing where they are installed."""
    is_program = is_bundled() if not host.program else Path(host.program).name == BUNDLED_PROGRAM
    if is_program or not (host.folder or _is_checkout()):
        return {}
    return {"PYTHONPATH": host.folder or str(project_root())}


def ssh_command(host: Host, program: list[str], variables: Mapping[str, str]) -> list[str]:
    """What runs a program on another machine. It asks nothing (a password, an unknown host's key), and ends where the connection is lost."""
    words = [*(f"{name}={value}" for name, value in variables.items()), *program]
    return ["ssh", *SSH_OPTIONS, host.ssh, f"exec env {shell_words(words)}"]


def launch_command(hosts: HostsFile, file: Path, backend: str, run: Path) -> list[str]:
    """What starts all ranks of a prepared run by hand: `mlx.launch`; for MPI mpirun itself, since mlx.launch gives it an option that
    Open MPI 4 refuses. The same program runs on every machine, at the same path: it cannot carry `program` and `folder` of a host."""
    alike = Host("")
    variables = [f"{name}={value}" for name, value in rank_environment(alike).items()]
    program = rank_program(alike, "rank", "--run", str(run))
    if backend == "mpi":
        slots = Counter(host.ssh for host in hosts.hosts)
        of_mpi = [part for variable in [*variables, *hosts.envs] for part in ("-x", variable)]
        machines = ",".join(f"{name}:{count}" for name, count in slots.items())
        return ["mpirun", "-np", str(len(hosts.hosts)), "--host", machines, *MPI_OPTIONS, *of_mpi, *program]
    of_mlx = [part for variable in variables for part in ("--env", variable)]
    return [_mlx_launch(), "--hostfile", str(file), "--backend", backend, *of_mlx, "--", *program]


def shell_words(words: list[str]) -> str:
    """Words for a POSIX shell; a path that begins with ~/ begins with the home folder of that shell's user."""
    return " ".join(
        f'"$HOME"/{shlex.quote(word[2:])}' if word.startswith("~/") else shlex.quote(word) for word in words
    )


def _mlx_launch() -> str:
    """mlx's script, beside our Python where that has it."""
    script = Path(sys.executable).with_name("mlx.launch")
    return str(script) if script.exists() else script.name


def _is_checkout() -> bool:
    return not (project_root() / "__init__.py").exists()
