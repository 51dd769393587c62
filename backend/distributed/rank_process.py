"""What a launcher has told this process of its rank, and what the process tells of itself."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version

import psutil

from backend.distributed.rank_info import RankInfo
from backend.utils.machine import chip

MACHINE_VARIABLE = "GRPO_STUDIO_MACHINE"
"""Environment variable with the name of this machine in the hosts file."""
BACKEND_VARIABLE = "GRPO_STUDIO_BACKEND"
"""Environment variable with the backend of MLX over which the ranks meet; without it this process is alone, unless MLX's own say more."""
OWN_FILES_VARIABLE = "GRPO_STUDIO_OWN_FILES"
"""Environment variable with the names of those that name a file made for this process alone."""
LOG_VARIABLE = "GRPO_STUDIO_RANK_LOG"
"""Environment variable that says where this process's output goes, for a person."""


def delete_own_files(environment: Mapping[str, str] = os.environ) -> None:
    """Delete the files that were made on this machine for MLX to read; it has read them."""
    for name in environment.get(OWN_FILES_VARIABLE, "").split():
        with suppress(OSError):
            os.unlink(environment[name])


def backend_of(environment: Mapping[str, str] = os.environ) -> str:
    """The backend over which this process is to meet the other ranks: of our launcher, or what the variables that `mlx.launch` or
    `mpirun` sets are for; "" where this process is the only one."""
    if named := environment.get(BACKEND_VARIABLE):
        return named
    return next((backend for name, backend in _VARIABLES.items() if environment.get(name)), "")


_VARIABLES = {
    "MLX_JACCL_COORDINATOR": "jaccl",
    "NCCL_HOST_IP": "nccl",
    "MLX_HOSTFILE": "ring",
    "OMPI_COMM_WORLD_SIZE": "mpi",
    "PMIX_RANK": "mpi",
    "PMI_RANK": "mpi",
}
"""Environment variable → the backend whose ranks have it."""


def own_info(rank: int) -> RankInfo:
    """This process, of rank `rank`."""
    return RankInfo(
        rank,
        os.environ.get(MACHINE_VARIABLE) or socket.gethostname(),
        pid=os.getpid(),
        chip=chip() or platform.machine(),
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        mlx=version("mlx"),
        python=platform.python_version(),
        log=os.environ.get(LOG_VARIABLE, ""),
    )
