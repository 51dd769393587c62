"""A rank of a run: its description, errors of other machines, and its process: orders, environment and signals."""

from __future__ import annotations

import base64
import json
import os
import platform
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from backend.trainer import control
from backend.utils.errors import UserError
from backend.utils.machine import chip
from backend.utils.text import quote

MACHINE_VARIABLE = "GRPO_STUDIO_MACHINE"  # this machine's name in the hosts file
LOG_VARIABLE = "GRPO_STUDIO_RANK_LOG"  # the place of this process's output
ORDERS_VARIABLE = "GRPO_STUDIO_LAUNCH"  # rank 0's orders
WATCH_VARIABLE = "GRPO_STUDIO_WATCH_STDIN"  # variable: end with stdin, which the launcher holds open
FILES_VARIABLE = "GRPO_STUDIO_FILES"  # files that MLX reads while it connects: JSON of variable → content
BACKEND_VARIABLE = "GRPO_STUDIO_BACKEND"  # the backend over which the ranks meet
ADDRESSES_VARIABLE = "GRPO_STUDIO_ADDRESSES"  # rank 0's addresses, separated by commas
BACKEND_MARKS = {  # environment variable → backend that sets it; "" for the variable that names the backend
    BACKEND_VARIABLE: "",
    "MLX_JACCL_COORDINATOR": "jaccl",
    "NCCL_HOST_IP": "nccl",
    "MLX_HOSTFILE": "ring",
    "OMPI_COMM_WORLD_SIZE": "mpi",
    "PMIX_RANK": "mpi",
    "PMI_RANK": "mpi",
}
RESTART_RANKS = 75  # exit code: start all ranks again
LEADER_LOST = 74  # exit code of a worker without a leader
STOPPED = 3
STOP_PATIENCE_S = 30.0

_REPORTING = threading.Lock()


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank as it introduces itself, and as the event log's `started` records it."""

    rank: int
    machine: str
    address: str = ""  # as rank 0 sees it
    pid: int = 0
    chip: str = ""
    memory_gb: float = 0.0
    mlx: str = ""
    python: str = ""
    log: str = ""  # place of its output

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
        self.rank = info.rank
        log = f" What it printed: {quote(info.log, 70)}." if info.log else ""
        super().__init__("hosts", f"{info} {quote(why, 90)}.{log}")


class WorkerError(UserError):
    """An error of a worker: the user's, a bug (with `traceback`), or a GPU error (`gpu_text`: mlx's words)."""

    def __init__(
        self, info: RankInfo, sentence: str, *, exit_code: int = 2, traceback: str = "", gpu_text: str = ""
    ) -> None:
        self.exit_code, self.gpu_text, self.place = exit_code, gpu_text, f"On {info}"
        super().__init__("hosts", f"{self.place}: {sentence}", traceback)


@dataclass(frozen=True, slots=True)
class Orders:
    """The launcher's orders to rank 0. Its report has `pid`, `met` (all connected), `lost` ([rank, sentence]) and
    `exit_code`; there is none where it was started by hand."""

    command: str  # the launcher's command line, for the event log
    is_checked: bool = False  # settings and files were checked already
    goes_on: bool = False  # restart without a lost rank
    notes: list[str] = field(default_factory=list)  # for the event log, as the warnings
    warnings: list[str] = field(default_factory=list)
    report_file: str = ""

    @classmethod
    def given(cls) -> Orders:
        """Those of the launcher that started this process, if any."""
        given = os.environ.get(ORDERS_VARIABLE)
        return cls(**json.loads(base64.b64decode(given))) if given else cls(shlex.join(sys.argv))

    def encoded(self) -> str:
        """For the environment, in letters that mpirun leaves as they are."""
        return base64.b64encode(json.dumps(asdict(self)).encode()).decode()

    def report(self, **news: Any) -> None:
        """Add to rank 0's report, from any thread. Raises OSError."""
        if self.report_file:
            with _REPORTING:
                half = Path(f"{self.report_file}.half")
                half.write_text(json.dumps(self.reported() | news), encoding="utf-8")
                half.rename(self.report_file)  # whole or not at all, for a reader that comes at any moment

    def reported(self) -> dict[str, Any]:
        return json.loads(Path(self.report_file).read_text(encoding="utf-8"))


def own_addresses() -> list[str]:
    """Addresses at which the others may reach rank 0: those of the hosts file, or all, local ones last."""
    if named := os.environ.get(ADDRESSES_VARIABLE):
        return named.split(",")
    by_hand = [os.environ.get("MLX_JACCL_COORDINATOR", "").rpartition(":")[0], os.environ.get("NCCL_HOST_IP", "")]
    with suppress(OSError, KeyError):  # started by hand
        ring = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text(encoding="utf-8"))
        by_hand += [entry.rpartition(":")[0] for entry in ring[0]]
    if by_hand := [address for address in by_hand if address]:
        return by_hand
    up = {name for name, about in psutil.net_if_stats().items() if about.isup}
    found = {
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80:")
    }
    return sorted(found, key=lambda address: (address == "::1" or address.startswith("127."), address))


def end_with_stdin() -> None:
    """End this process, with all its threads, when its stdin ends."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
            os.write(2, b"the program that started this process is gone; it ends.\n")
        os._exit(LEADER_LOST)

    threading.Thread(target=watch, daemon=True, name="stdin watch").start()


def leave_stops_to_leader(patience_s: float = STOP_PATIENCE_S) -> None:
    """Make a worker ignore stop signals: Ctrl-C under `mlx.launch` or `mpirun` reaches every process, and rank 0 needs
    this one until it has saved. A worker that was meant alone ends after `patience_s`."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    # The main thread may be in an MLX sum that never ends, so no Python handler runs: C writes to this pipe at once.
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    control.on_stop_signals(lambda number, frame: None)
    for number in control.STOP_SIGNALS:
        signal.siginterrupt(number, False)  # MLX's sockets take an interrupted call for a lost rank

    def end_late() -> None:
        os.read(woken, 1)
        time.sleep(patience_s)
        with suppress(OSError):
            os.write(2, b"a stop signal came, and rank 0 goes on; this process ends.\n")
        os._exit(STOPPED)

    threading.Thread(target=end_late, daemon=True, name="stop signals").start()
