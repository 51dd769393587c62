"""The ranks of a run: the description of each, and the errors of other machines."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Any

import psutil

from backend.utils.errors import UserError
from backend.utils.machine import chip
from backend.utils.text import quote

MACHINE_VARIABLE = "GRPO_STUDIO_MACHINE"
"""This machine's name in the hosts file."""
LOG_VARIABLE = "GRPO_STUDIO_RANK_LOG"
"""The place of this process's output."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank as it introduces itself, and as the event log's `started` records it."""

    rank: int
    machine: str
    address: str = ""
    """As rank 0 sees it."""
    pid: int = 0
    chip: str = ""
    memory_gb: float = 0.0
    mlx: str = ""
    python: str = ""
    log: str = ""
    """Place of its output."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RankInfo:
        """From a mapping with more or fewer keys. Raises TypeError, ValueError or KeyError."""
        known: dict[str, Any] = {field.name: raw[field.name] for field in fields(cls) if field.name in raw}
        return cls(**known | {"rank": int(raw["rank"]), "machine": str(raw["machine"])})

    @classmethod
    def of_this_process(cls, rank: int) -> RankInfo:
        return cls(
            rank,
            os.environ.get(MACHINE_VARIABLE) or socket.gethostname(),
            pid=os.getpid(),
            chip=chip() or platform.machine(),
            memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
            mlx=version("mlx"),
            python=platform.python_version(),
            log=os.environ.get(LOG_VARIABLE, ""),
        )

    def __str__(self) -> str:
        return f"{quote(self.machine, 40)} (rank {self.rank})"


class LostRankError(UserError):
    """A rank's process has ended, its machine is silent, or its cable is out. `why` follows its name."""

    def __init__(self, info: RankInfo, why: str) -> None:
        self.rank, self.machine, self.why = info.rank, info.machine, why
        log = f" What it printed: {quote(info.log, 70)}." if info.log else ""
        super().__init__("hosts", f"{info} {quote(why, 90)}.{log}")


class WorkerError(UserError):
    """An error of a worker: the user's, a bug (with `traceback`), or a GPU error (`gpu_text`: mlx's words)."""

    def __init__(
        self, info: RankInfo, sentence: str, *, exit_code: int = 2, traceback: str = "", gpu_text: str = ""
    ) -> None:
        self.rank, self.machine, self.exit_code = info.rank, info.machine, exit_code
        self.traceback, self.gpu_text = traceback, gpu_text
        self.place = f"On {info}"
        super().__init__("hosts", f"{self.place}: {sentence}")
