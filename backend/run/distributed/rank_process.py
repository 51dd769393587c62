"""What a launcher has told this process of its rank, and what the process tells of itself."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import version

import psutil

from backend.spec.distributed.rank_info import RankInfo
from backend.spec.machine import chip

MACHINE_VARIABLE = "GRPO_STUDIO_MACHINE"
"""Environment variable with the name of this machine in the hosts file."""
LOG_VARIABLE = "GRPO_STUDIO_RANK_LOG"
"""Environment variable with the file that this process's output goes to."""


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
