"""Commands and environments of a run's processes."""

import contextlib
import ctypes.util
import json
import os
import random
import shlex
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from backend.distributed.hosts_file import Host, HostsFile
from backend.utils.command import BUNDLED_PROGRAM, backend_command, is_bundled
from backend.utils.places import project_root

CONNECT_S = 8
SSH_OPTIONS = shlex.split(
    f"-T -o BatchMode=yes -o ConnectTimeout={CONNECT_S} -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "
    "-o LogLevel=ERROR"
)
MPI_OPTIONS = shlex.split(
    "--quiet --enable-recovery --mca mpi_yield_when_idle 1 --mca plm_rsh_args '-o BatchMode=yes' "
    "--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 4"
)
"""mpirun's options: rank 0 outlives another rank, waiting ranks yield their core, and large sums go round a ring."""
FIRST_PORT, PORTS = 20_000, 10_000  # below those that systems hand out
LIBRARY_VARIABLE = "MLX_MPI_LIBNAME"
FILES_VARIABLE = "GRPO_STUDIO_FILES"  # files that MLX reads while it connects: JSON of variable → content
_USUAL_FOLDERS = ("/opt/homebrew/bin", "/usr/local/bin", "/opt/local/bin")  # a Mac app lacks these in its PATH


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
    """Command that starts all ranks by hand, alike: `mlx.launch`, or mpirun, which gets an option from mlx.launch that
    Open MPI 4 refuses."""
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


def mlx_environment(hosts: HostsFile, backend: str, rank: int, port: int) -> tuple[dict[str, str], dict[str, str]]:
    """The environment in which MLX finds the other ranks, as `mlx.launch` sets it: (variables, files). `files`:
    variable that names a file → its content. `port`: the first port."""
    variables = {name: value for name, _, value in (entry.partition("=") for entry in hosts.envs)}
    if backend != "mpi":
        variables["MLX_RANK"] = str(rank)
    first = hosts.hosts[0].ips[0] if hosts.hosts[0].ips else "127.0.0.1"
    if backend == "ring":
        # Each rank's addresses; the ports differ also where ranks share a machine.
        rows: list[list[str]] = []
        for host in hosts.hosts:
            rows.append([f"{address}:{port + index}" for index, address in enumerate(host.ips)])
            port += len(host.ips)
        return variables, {"MLX_HOSTFILE": json.dumps(rows)}
    if backend in ("jaccl", "jaccl-ring"):
        variables["MLX_JACCL_COORDINATOR"] = f"{first}:{port}"
        if backend == "jaccl-ring":
            variables["MLX_JACCL_RING"] = "1"
        return variables, {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in hosts.hosts])}
    if backend == "nccl":
        before = sum(host.ssh == hosts.hosts[rank].ssh for host in hosts.hosts[:rank])
        variables |= {"NCCL_HOST_IP": first, "NCCL_PORT": str(port)}
        variables |= {"MLX_WORLD_SIZE": str(len(hosts.hosts)), "CUDA_VISIBLE_DEVICES": str(before)}
    return variables, {}


def mpirun() -> str | None:
    """The path of mpirun; None where Open MPI is not installed."""
    return shutil.which("mpirun") or shutil.which("mpirun", path=os.pathsep.join(_USUAL_FOLDERS))


def mpi_variables() -> dict[str, str]:
    """The variable with which MLX finds the MPI library: on a Mac its path, elsewhere its name."""
    if os.environ.get(LIBRARY_VARIABLE):
        return {LIBRARY_VARIABLE: os.environ[LIBRARY_VARIABLE]}
    program = mpirun()
    if sys.platform == "darwin" and program is not None:
        found = sorted(Path(program).parent.parent.glob("lib/libmpi.*dylib"))
        return {LIBRARY_VARIABLE: str(found[-1])} if found else {}
    name = ctypes.util.find_library("mpi")
    return {LIBRARY_VARIABLE: name} if name else {}
