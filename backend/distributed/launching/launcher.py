"""Starts the ranks of a run, waits for rank 0, and sees to it that nothing is left running on any machine.

Rank 0 is the trainer: it writes the folder, obeys the window, and ends the run. The launcher passes stop signals on to it, ends what is
left once it has ended, writes the event log's last line where it was killed, and starts all ranks anew where it asks for that: after an error of
a GPU, or without a machine that was lost (`on_lost_rank: go_on`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import psutil

from backend.distributed.channel import LEADER_LOST
from backend.distributed.hosts_file import FIRST_PORT, PORTS, HostsFile, ssh_command
from backend.distributed.launching.late_ending import write_late_ending
from backend.distributed.launching.rank_start import PID_LINE, LaunchPlan, RankProcess, start_ranks
from backend.distributed.orders import RESTART_RANKS, Orders, OrdersFolder
from backend.runs.run_folder import RunFolder
from backend.trainer import control
from backend.utils.disk_faults import writing
from backend.utils.file_lock import is_alive
from backend.utils.files import make_private_folder
from backend.utils.text import quote

# The ranks that a launcher has started: who has ended, with what, and how all of them are ended on every machine.

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


# ── worker logs ──────────────────────────────────────────────────────────────────────────────────────────────────────

# The logs of a run's workers: what each of them printed since the ranks were started last, in the run's folder.

TAIL_BYTES = 4_096


def logs_folder(run: RunFolder) -> Path:
    """The folder of the logs, made if need be. Raises DiskError."""
    folder = run.path / "ranks"
    with writing(folder):
        make_private_folder(folder)
    return folder


def last_line(log: Path) -> str:
    """The last line that is not empty; "" where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# ── launcher ─────────────────────────────────────────────────────────────────────────────────────────────────────────

POLL_S = 0.2
MEETING_S = 120.0
"""How long the ranks may take until all are connected: Python and MLX are loaded on each machine."""
STOPPED_S = 12.0
"""How long a rank of this machine may be stopped before the ranks are connected; afterwards the others notice it."""
ENDING_S = 25.0
"""How long rank 0 may take to save and end once a machine is lost; then it is killed."""
EXITING_S = 10.0
"""How long the process of rank 0 may take to end once it has told its exit code."""
LEAVING_S = {True: 8.0, False: 1.0}
"""How long workers may take to end by themselves after rank 0 has: after a run that went well, and after one that did not."""

RESUMED = "The run goes on from its last checkpoint when it is resumed."

EndKind = Literal["finished", "stopped", "failed", "restart"]


@dataclass(frozen=True, slots=True)
class LaunchEnd:
    """How one start of the ranks has ended."""

    kind: EndKind
    exit_code: int
    sentence: str = ""
    """Why, where rank 0 has not said it itself."""
    lost_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A run and its machines. `orders` are those of its first start; `options` are of the verb `rank`."""

    run: RunFolder
    hosts: HostsFile
    backend: str
    orders: Orders
    options: Sequence[str] = ()


def run_ranks(launch: Launch) -> LaunchEnd:
    """Start the ranks, as often as it takes, until the run has ended. A stop signal makes rank 0 save and stop."""
    with _private_folder() as folder, control.handlers_restored() as afterwards, stop_requests() as requests:
        hosts, orders, logs = launch.hosts, launch.orders, logs_folder(launch.run)
        while True:
            plan = LaunchPlan(
                hosts, launch.backend, launch.run.path, OrdersFolder(folder), logs, free_port(hosts), launch.options
            )
            end = RankWatch(plan, requests).run(orders)
            if end.kind != "restart":
                break
            if requests:
                end = LaunchEnd(
                    "stopped", 3, f"Stopped at its last checkpoint because {_name(requests[0])} was received."
                )
                break
            # The run has begun: what is to be told from now on is why it was started anew.
            orders = replace(orders, is_checked=True, notes=[], warnings=[])
            if end.lost_rank is not None:
                hosts = without(hosts, end.lost_rank)
                orders = replace(orders, warnings=[f"{end.sentence} The run goes on without it."])
        afterwards.process_ends = True
        if end.sentence:
            write_late_ending(launch.run, end.kind, end.sentence)
        return end


def without(hosts: HostsFile, rank: int) -> HostsFile:
    """The machines but for one; the RDMA devices that lead to it are left out too."""
    kept = [host for other, host in enumerate(hosts.hosts) if other != rank]
    return replace(
        hosts, hosts=tuple(replace(host, rdma=host.rdma[:rank] + host.rdma[rank + 1 :]) for host in kept)
    )  # fmt: skip


class RankWatch:
    """One start of the ranks of a plan, until rank 0 has ended. `requests`: stop signals that have come, in their order."""

    def __init__(self, plan: LaunchPlan, requests: Sequence[int]) -> None:
        self._plan, self._requests = plan, requests
        self._passed_on = 0
        self._deadline: float | None = None
        """When rank 0 is killed (monotonic): a machine is lost, and it has not ended."""
        self._why = ""
        """What is wrong, as far as the launcher knows."""
        self._stopped_since: float | None = None
        """Since when a rank of this machine has been stopped (monotonic)."""

    def run(self, orders: Orders) -> LaunchEnd:
        self._plan.orders.give(orders)
        try:
            self._ranks = RunningRanks(self._plan)
        except OSError as error:
            return LaunchEnd("failed", 2, f"The ranks could not be started: {error.strerror or error}.")
        went_well = False
        try:
            self._wait()
            end = self._end()
            went_well = end.exit_code == 0
            return end
        finally:
            self._ranks.end(LEAVING_S[went_well])

    def _wait(self) -> None:
        """Until rank 0 has ended, or can be waited for no longer."""
        meets_until = time.monotonic() + MEETING_S
        while 0 not in self._ranks.codes:
            ended = self._ranks.next_end(POLL_S)
            if ended is not None and ended.rank is None:  # mpirun, and with it all that it has started
                self._ranks.codes.setdefault(0, UNKNOWN)
                return
            has_met = self._plan.orders.met() is not None
            if ended is not None and ended.rank != 0 and ended.code != 0:
                self._on_ended_worker(ended.rank or 0, ended.code, has_met)
            if self._pass_on_signals(has_met):
                return
            if not has_met and (self._why or self._is_stopped() or time.monotonic() > meets_until):
                self._why = self._why or f"The ranks did not connect within {MEETING_S:.0f} seconds{self._silent()}."
                return
            if self._plan.orders.exit_code() is not None:  # all is written: nothing is lost if it hangs now
                self._expect_end("", within_s=EXITING_S)
            elif (lost := self._plan.orders.lost()) is not None:
                self._expect_end(lost[1])
            if self._deadline is not None and time.monotonic() > self._deadline:
                return

    def _on_ended_worker(self, rank: int, code: int, has_met: bool) -> None:
        """Rank 0 finds it out by itself, unless it has not got so far, or was stopped in the middle of something."""
        name = self._plan.hosts.label(rank)
        if not has_met:
            told = last_line(self._plan.log(rank))
            self._why = f"{name} ended before the run began" + (
                f": {quote(told, 120)}" if told else f" (exit code {code})."
            )
            return
        if code == LEADER_LOST:
            self._expect_end("Rank 0 did not answer the other machines, and was ended.")
        else:
            self._expect_end(f"The process on {name} ended (exit code {code}).")
        self._ranks.signal_leader(signal.SIGCONT)  # a stopped process can then save and end by itself

    def _is_stopped(self) -> bool:
        """Whether a rank of this machine has been stopped for too long, before the others could know of it."""
        if not (stopped := self._ranks.stopped_here()):
            self._stopped_since = None
            return False
        self._stopped_since = self._stopped_since or time.monotonic()
        if time.monotonic() - self._stopped_since < STOPPED_S:
            return False
        self._why = f"The process of rank {stopped[0]}, on this machine, was stopped (SIGSTOP) before the run began."
        return True

    def _expect_end(self, why: str, within_s: float | None = None) -> None:
        if self._deadline is None:
            self._deadline, self._why = time.monotonic() + (within_s or ENDING_S), why

    def _pass_on_signals(self, has_met: bool) -> bool:
        """Tell rank 0 of new stop signals. → whether it is not waited for, because it has not begun."""
        new = self._requests[self._passed_on :]
        self._passed_on += len(new)
        if new and not has_met:
            return True
        for number in new:
            self._ranks.signal_leader(number)
        return False

    def _silent(self) -> str:
        """Who has printed nothing, or what was printed last."""
        for rank in range(1, self._plan.size):
            if told := last_line(self._plan.log(rank)):
                return f"; {self._plan.hosts.label(rank)} says: {quote(told, 100)}"
        return ""

    def _end(self) -> LaunchEnd:
        lost = self._plan.orders.lost()
        rank, sentence = lost if lost is not None else (None, "")
        code = self._ranks.codes.get(0)
        told = self._plan.orders.exit_code()
        code = told if told is not None else code
        if code == RESTART_RANKS:
            return LaunchEnd("restart", code, sentence, rank)
        if code is not None and code >= 0:
            kinds: dict[int, EndKind] = {0: "finished", 3: "stopped"}
            return LaunchEnd(kinds.get(code, "failed"), code)
        if self._requests:
            return LaunchEnd(
                "stopped", 3, f"Stopped before it had begun, because {_name(self._requests[0])} was received."
            )
        if code is None:  # it is killed now, and this is why
            return LaunchEnd("failed", 2, f"{self._why} {RESUMED}", rank)
        how = f" (signal {-code})" if code != UNKNOWN else ""
        return LaunchEnd("failed", 2, f"The process of rank 0, on this machine, was killed{how}. {RESUMED}")


def _name(number: int) -> str:
    return signal.Signals(number).name


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """The stop signals that come while it lasts, in their order."""
    received: list[int] = []
    control.on_stop_signals(lambda number, frame: received.append(number))
    control.unblock_stop_signals()
    yield received


@contextmanager
def _private_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="grpo-studio-launch-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port(hosts: HostsFile) -> int:
    """The first of a row of ports that are free on this machine, one for each address in the hosts file; of the others it is hoped, as
    nothing else uses this range."""
    count = max(1, sum(len(host.ips) for host in hosts.hosts))
    for _ in range(100):
        port = random.randrange(FIRST_PORT, FIRST_PORT + PORTS - count)
        if all(_is_free(port + index) for index in range(count)):
            return port
    raise OSError("no ports are free on this machine")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
