"""The ranks that a launcher has started: who has ended, with what, and how all of them are ended on every machine."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import psutil

from backend.run.distributed.launching.rank_start import PID_LINE, LaunchPlan, RankProcess, start_ranks
from backend.spec.distributed.command import ssh_command
from backend.spec.process_ids import is_alive

KILL_PATIENCE_S = 10.0
"""How long it may take to end a process on another machine."""
MPI_PATIENCE_S = 3.0
"""How long mpirun may take to end its ranks, before they are killed one by one."""

UNKNOWN = -1_000
"""The exit code of a rank under mpirun, which tells none."""

NOISE = re.compile(rb"\[.*\] PMIX ERROR: BAD-PARAM in file .*pmix_event_notification\.c")
"""What Open MPI 4 says of every rank that ends without MPI_Finalize, which would wait for the others."""


@dataclass(frozen=True, slots=True)
class EndedProcess:
    """`rank` is None for mpirun; `code` as `subprocess` has it: below 0 for a signal."""

    rank: int | None
    code: int


class RunningRanks:
    """Starts the ranks of `plan`. Raises OSError where a program cannot be started."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._ended: queue.SimpleQueue[EndedProcess] = queue.SimpleQueue()
        self.codes: dict[int, int] = {}
        """Rank → its exit code, of those that have ended."""
        self._processes = start_ranks(plan)
        self._pids = {each.rank: each.process.pid for each in self._processes if each.is_here and each.rank is not None}
        self._threads = [self._thread(self._watch, each) for each in self._processes]
        self._threads += [
            self._thread(self._pass_on, each) for each in self._processes if each.process.stdout is not None
        ]

    def _thread(self, work: object, each: RankProcess) -> threading.Thread:
        assert callable(work)
        thread = threading.Thread(target=work, args=(each,), daemon=True)
        thread.start()
        return thread

    @property
    def leader_pid(self) -> int | None:
        """The process id of rank 0, once it is known."""
        return self._pids.get(0)

    def next_end(self, timeout_s: float) -> EndedProcess | None:
        """A process that has ended since the last call; None where none has within `timeout_s` seconds."""
        with contextlib.suppress(queue.Empty):
            ended = self._ended.get(timeout=timeout_s)
            if ended.rank is not None:
                self.codes[ended.rank] = ended.code
            return ended
        return self._vanished()

    def _vanished(self) -> EndedProcess | None:
        """A rank of mpirun's on this machine that is no more: mpirun does not tell."""
        for rank, pid in dict(self._pids).items():
            if (
                rank not in self.codes
                and not self._is_child(rank)
                and self._plan.hosts.is_here(rank)
                and not is_alive(pid)
            ):
                self.codes[rank] = UNKNOWN
                return EndedProcess(rank, UNKNOWN)
        return None

    def _is_child(self, rank: int) -> bool:
        return any(each.rank == rank for each in self._processes)

    def stopped_here(self) -> list[int]:
        """The ranks on this machine whose process is stopped, as SIGSTOP does it: alive, and told to do nothing."""
        here = [
            (rank, pid) for rank, pid in self._pids.items() if rank not in self.codes and self._plan.hosts.is_here(rank)
        ]
        return [rank for rank, pid in here if _is_stopped(pid)]

    def signal_leader(self, number: int) -> None:
        if (pid := self.leader_pid) is not None and 0 not in self.codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def end(self, patience_s: float) -> None:
        """Wait so long for the processes to end by themselves, and end what is left, on every machine."""
        until = time.monotonic() + patience_s
        for each in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, until - time.monotonic()))
        left = [each for each in self._processes if each.process.poll() is None]
        for each in left:
            if each.rank is None:
                each.process.terminate()
        for each in left:
            if each.rank is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(MPI_PATIENCE_S)
        self._kill_here(left)
        self._kill_there(left)
        for each in left:
            _kill_group(each.process.pid)  # ssh, or mpirun
        for each in self._processes:
            each.process.wait()
            if each.process.stdin is not None:
                each.process.stdin.close()
        for thread in self._threads:
            thread.join(1.0)

    def _kill_here(self, left: Sequence[RankProcess]) -> None:
        running = {each.rank for each in left}
        for rank, pid in self._pids.items():
            if self._plan.hosts.is_here(rank) and (rank in running or None in running):
                _kill_group(pid)

    def _kill_there(self, left: Sequence[RankProcess]) -> None:
        """A rank on another machine goes on when its ssh is killed, if it does not look at its stdin: in a sum that never ends."""
        running = {each.rank for each in left}
        there = [
            rank for rank in self._pids if not self._plan.hosts.is_here(rank) and (rank in running or None in running)
        ]
        kills = [
            subprocess.Popen(
                ssh_command(self._plan.hosts.hosts[rank], ["/bin/kill", "-9", str(self._pids[rank])], {}),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )
            for rank in there
        ]  # fmt: skip
        until = time.monotonic() + KILL_PATIENCE_S
        for kill in kills:
            try:
                kill.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:  # the machine is gone, and its rank ends itself
                kill.kill()
                kill.wait()

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self, each: RankProcess) -> None:
        self._ended.put(EndedProcess(each.rank, each.process.wait()))

    def _pass_on(self, each: RankProcess) -> None:
        """Take the lines with process ids out of what a process prints; the rest goes to a worker's log, or to where the launcher prints."""
        assert each.process.stdout is not None
        with contextlib.ExitStack() as stack:
            out: BinaryIO = (
                sys.stdout.buffer if each.rank is None else stack.enter_context(self._plan.log(each.rank).open("wb", 0))
            )
            for line in each.process.stdout:
                if found := PID_LINE.fullmatch(line):
                    self._pids[int(found[1])] = int(found[2])
                    continue
                if each.rank is None and NOISE.match(line):
                    continue
                with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
                    out.write(line)
                    out.flush()


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _kill_group(pid: int) -> None:
    """SIGKILL to a process and what it has started in its session; a stopped one too."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
