"""Starts the ranks of a run, waits for rank 0, and leaves nothing running on any machine.

Rank 0 is the trainer. The launcher passes stop signals on to it, ends the other processes after it, ends the event log
where rank 0 was killed, and starts all ranks again after a GPU error, or without a lost machine (`on_lost_rank:
go_on`).

`mlx.launch` ends every rank as soon as one fails, before rank 0 has saved. Every process has its own session, so Ctrl-C
reaches the launcher alone; workers end with their stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from backend.distributed import commands, ranks
from backend.distributed.hosts_file import HostsFile
from backend.runs.events import ENDINGS, EventLog, event_ends
from backend.runs.run_folder import RunFolder, hold_lock
from backend.trainer import control
from backend.trainer.machine import GPU_TIMEOUT_VARIABLE
from backend.utils.command import backend_environment
from backend.utils.disk import writing
from backend.utils.errors import UserError
from backend.utils.files import last_line, make_private_folder
from backend.utils.text import quote

POLL_S = 0.2
MEETING_S = 120.0  # seconds for the ranks until all are connected
ENDING_S = 25.0  # seconds to save and end after a loss
EXITING_S = 10.0  # seconds to end after reporting an exit code
LEAVING_S = {True: 8.0, False: 1.0}  # seconds for workers to end, by success
MPI_PATIENCE_S = 3.0
RESUMED = "The run goes on from its last checkpoint when it is resumed."

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
"""For sh under mpirun: a worker's output goes to a file. Arguments: folder of logs on rank 0's machine, run name,
program."""


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
    """Start the ranks until the run has ended. `options`: of the verb `rank`. A stop signal makes rank 0 save and stop.
    Raises DiskError."""
    requests: list[int] = []
    with tempfile.TemporaryDirectory(prefix="grpo-studio-launch-") as folder, control.handlers_restored() as afterwards:
        control.on_stop_signals(lambda number, frame: requests.append(number))
        control.unblock_stop_signals()
        while (end := _Start(run, hosts, backend, orders, options, Path(folder), requests).run()).kind == "restart":
            if requests:
                name = signal.Signals(requests[0]).name
                end = LaunchEnd("stopped", 3, f"Stopped at its last checkpoint because {name} was received.")
                break
            # The run has begun: its event log needs nothing but the reason of the new start.
            orders = replace(orders, is_checked=True, notes=[], warnings=[])
            if end.lost_rank is not None:
                hosts = without(hosts, end.lost_rank)
                orders = replace(orders, warnings=[f"{end.sentence} The run goes on without it."])
        afterwards.process_ends = True
        if end.sentence:
            write_late_ending(run, end.kind, end.sentence)
        return end


def without(hosts: HostsFile, rank: int) -> HostsFile:
    """The machines but for one, and without the RDMA devices that lead to it."""
    kept = [host for other, host in enumerate(hosts.hosts) if other != rank]
    return replace(hosts, hosts=tuple(replace(host, rdma=host.rdma[:rank] + host.rdma[rank + 1 :]) for host in kept))


def write_late_ending(run: RunFolder, kind: str, sentence: str) -> bool:
    """End an unended event log, unless another process trains the run. → true if it was written."""
    try:
        lock = hold_lock(run)
    except UserError:
        return False
    try:
        events = event_ends(run.events)
        if events and events[-1]["kind"] in ENDINGS:
            return False
        step = max((int(event["step"]) for event in events if event["kind"] == "step"), default=0)
        event_log = EventLog(run.events)
        event_log.write(kind, step=step, reason=kind, sentence=sentence)
        event_log.close()
        return True
    finally:
        os.close(lock)


class _Start:
    def __init__(
        self,
        run: RunFolder,
        hosts: HostsFile,
        backend: str,
        orders: ranks.Orders,
        options: Sequence[str],
        folder: Path,
        requests: Sequence[int],
    ) -> None:
        self._run, self._hosts, self._options, self._requests = run, hosts, options, requests
        self._ranks = range(len(hosts.hosts))
        self._orders = replace(orders, report_file=str(folder / "report.json"))
        self._logs = run.path / "ranks"
        self._backend = backend if len(self._ranks) > 1 else ""
        self._by_mpi = self._backend == "mpi"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # of each rank; under mpirun only mpirun's
        self._deadline: float | None = None  # when rank 0 is killed (monotonic)
        self._why = ""

    def run(self) -> LaunchEnd:
        Path(self._orders.report_file).unlink(missing_ok=True)  # of the start before
        with writing(self._logs):
            make_private_folder(self._logs)
        exit_code = 1
        try:
            try:
                port = commands.free_port(self._hosts)
                for rank in self._ranks[: 1 if self._by_mpi else None]:
                    self._start(rank, port)
            except OSError as error:
                return LaunchEnd("failed", 2, f"The ranks could not be started: {error.strerror or error}.")
            self._wait()
            end = self._end()
            exit_code = end.exit_code
            return end
        finally:
            self._end_processes(LEAVING_S[exit_code == 0])

    def _start(self, rank: int, port: int) -> None:
        host = self._hosts.hosts[rank]
        variables, files = commands.mlx_environment(self._hosts, self._backend or "mpi", rank, port)
        variables = commands.program_environment(host) | variables | {commands.FILES_VARIABLE: json.dumps(files)}
        if self._backend:
            variables[ranks.BACKEND_VARIABLE] = self._backend
        if rank:
            variables |= {ranks.WATCH_VARIABLE: "1", ranks.LOG_VARIABLE: f"ranks/rank-{rank}.log in the run folder"}
        else:
            variables |= {ranks.ORDERS_VARIABLE: self._orders.encoded(), ranks.ADDRESSES_VARIABLE: ",".join(host.ips)}
        command = commands.rank_program(host, "rank", "--run", str(self._run.path), *self._options)
        environment = backend_environment() | variables
        relaxed = os.environ.get(GPU_TIMEOUT_VARIABLE)
        of_python = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        away = variables | of_python | ({GPU_TIMEOUT_VARIABLE: relaxed} if relaxed else {})
        if self._by_mpi:
            exported = [f"{name}={value}" for name, value in (away | commands.mpi_variables()).items()]
            shell = ["/bin/sh", "-c", _UNDER_MPI, "rank", str(self._logs), self._run.name, *command]
            command = commands.mpi_command(commands.mpirun() or "mpirun", self._hosts, exported, shell)
            environment = backend_environment()
        elif not self._hosts.is_here(rank):
            command = commands.ssh_command(host, command, away | {ranks.MACHINE_VARIABLE: host.ssh})
            environment = dict(os.environ)
        sys.stdout.flush()
        with contextlib.ExitStack() as logs:
            stdin, stdout, stderr = subprocess.DEVNULL, None, None
            if rank:
                log = logs.enter_context(self._log(rank).open("wb"))
                stdin, stdout, stderr = subprocess.PIPE, log, subprocess.STDOUT
            elif self._by_mpi:
                stderr = logs.enter_context((self._logs / "mpirun.log").open("wb"))
            self._processes[rank] = subprocess.Popen(
                command, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
            )

    def _wait(self) -> None:
        meets_until = time.monotonic() + MEETING_S
        ended: set[int] = set()
        passed_on = 0
        while self._processes[0].poll() is None:
            report = self._orders.reported()
            has_met = report.get("met", False)
            failed = [rank for rank, each in self._processes.items() if rank not in ended and each.poll()]
            ended.update(failed)
            new, passed_on = self._requests[passed_on:], len(self._requests)
            if not has_met:
                if time.monotonic() > meets_until:
                    self._why = f"The ranks did not connect within {MEETING_S:.0f} seconds{self._last_words()}."
                for rank in failed:
                    words, code = last_line(self._log(rank)), self._processes[rank].returncode
                    how = f": {quote(words, 120)}" if words else f" (exit code {code})."
                    self._why = f"{self._hosts.label(rank)} ended before the run began{how}"
                if new or self._why:
                    return
            for number in new:
                self._signal_leader(number)
            for rank in failed:  # rank 0 finds out by itself, unless it is stopped
                code = self._processes[rank].returncode
                why = f"The process on {self._hosts.label(rank)} ended (exit code {code})."
                silent = "Rank 0 did not answer the other machines, and was ended."
                self._expect_end(silent if code == ranks.LEADER_LOST else why)
                self._signal_leader(signal.SIGCONT)  # it can then save and end by itself
            if "exit_code" in report:  # all is written: nothing is lost if it hangs now
                self._expect_end("", EXITING_S)
            elif "lost" in report:
                self._expect_end(report["lost"][1])
            if self._deadline is not None and time.monotonic() > self._deadline:
                return
            time.sleep(POLL_S)

    def _expect_end(self, why: str, within_s: float = ENDING_S) -> None:
        if self._deadline is None:
            self._deadline, self._why = time.monotonic() + within_s, why

    def _leader_pid(self) -> int | None:
        return self._orders.reported().get("pid") if self._by_mpi else self._processes[0].pid

    def _signal_leader(self, number: int) -> None:
        if (pid := self._leader_pid()) is not None and self._processes[0].poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def _last_words(self) -> str:
        logs = [(self._hosts.label(rank), self._log(rank)) for rank in self._ranks[1:]]
        for name, log in [*logs, ("mpirun", self._logs / "mpirun.log")]:
            if words := last_line(log):
                return f"; {name} says: {quote(words, 100)}"
        return ""

    def _end(self) -> LaunchEnd:
        report = self._orders.reported()
        rank, sentence = report.get("lost", (None, ""))
        # mpirun's own exit code says nothing of rank 0's.
        code: int | None = report.get("exit_code", None if self._by_mpi else self._processes[0].returncode)
        if code == ranks.RESTART_RANKS:
            return LaunchEnd("restart", code, sentence, rank)
        if code is not None and code >= 0:
            return LaunchEnd("finished" if code == 0 else "stopped" if code == 3 else "failed", code)
        if self._requests:
            name = signal.Signals(self._requests[0]).name
            return LaunchEnd("stopped", 3, f"Stopped before it had begun, because {name} was received.")
        if self._processes[0].poll() is None:  # it is killed now, and this is why
            return LaunchEnd("failed", 2, f"{self._why} {RESUMED}", rank)
        if self._by_mpi and not report.get("met"):
            return LaunchEnd("failed", 2, f"mpirun ended before the run began{self._last_words()}.")
        how = f" (signal {-code})" if code is not None else ""
        return LaunchEnd("failed", 2, f"The process of rank 0, on this machine, was killed{how}. {RESUMED}")

    def _end_processes(self, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        if self._by_mpi and self._processes and self._processes[0].poll() is None:
            self._processes[0].terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[0].wait(MPI_PATIENCE_S)
            if (pid := self._leader_pid()) is not None:
                _kill_group(pid)
        for process in self._processes.values():
            if process.poll() is None:
                _kill_group(process.pid)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
