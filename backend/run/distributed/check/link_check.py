"""Starts a measurement on all ranks at the same time, and judges what comes of it (`backend.run.distributed.check.link` measures)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from backend.run.distributed.check.machine_probes import Abandoned, NotReached, Probe, in_parallel
from backend.run.distributed.check.machine_verbs import LINK, MARKER
from backend.spec.distributed.backend_environment import FIRST_PORT, PORTS, rank_environment_of
from backend.spec.distributed.command import MPI_OPTIONS, rank_environment, rank_program, shell_words
from backend.spec.distributed.hosts_file import Host, HostsFile
from backend.spec.distributed.machine_report import LinkSpeed
from backend.spec.user_input.text import shown

LINK_S = 45.0
"""How long a measurement may take: loading mlx, connecting, and 60 sums; over Wi-Fi about 20 s."""
POLL_S = 0.1


def link_speed(hosts: HostsFile, backend: str, probes: Sequence[Probe], check: Callable[[], None]) -> LinkSpeed:
    """As the slowest rank measured it. `probes`: one for every rank, in order. Raises NotReached, and whatever `check` raises."""
    answers = _by_mpi(hosts, check) if backend == "mpi" else _by_probes(hosts, backend, probes)
    speeds = [LinkSpeed.from_dict(answer["speed"]) for answer in answers]
    if any(answer["size"] != len(hosts.hosts) for answer in answers):
        raise NotReached(f"Only {answers[0]['size']} of {len(hosts.hosts)} ranks have found each other over {backend}.")
    latency, rate = max(speed.latency_s for speed in speeds), min(speed.bytes_per_second for speed in speeds)
    return LinkSpeed(latency, rate, speeds[0].neighbours)


def _by_probes(hosts: HostsFile, backend: str, probes: Sequence[Probe]) -> list[dict[str, Any]]:
    port = FIRST_PORT + random.randrange(PORTS)
    answers: dict[int, dict[str, Any]] = {}
    problems: list[str] = []

    def measure(probe: Probe) -> None:
        environment = rank_environment_of(hosts, backend, probe.rank, port)
        request = {"ask": "link", "backend": backend, "variables": environment.variables, "files": environment.files}
        try:
            answers[probe.rank] = probe.ask(request, LINK_S)
        except NotReached as problem:
            problems.append(str(problem))
            # The others wait for this rank and would do so until the time is over.
            for other in probes:
                other.abandon.set()
        except Abandoned:
            pass

    in_parallel(measure, probes)
    if problems:
        advice = "A firewall may be between them, or an address in the hosts file wrong."
        raise NotReached(f"The machines could not sum over {backend}. {problems[0]} {advice}")
    return [answers[rank] for rank in range(len(probes))]


def _by_mpi(hosts: HostsFile, check: Callable[[], None]) -> list[dict[str, Any]]:
    """mpirun starts ranks of its own, of which the first answers for all."""
    process = subprocess.Popen(
        _mpi_command(hosts),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out = _output_of(process, check)
    finally:
        # SIGTERM lets mpirun end its ranks on all machines; each has a limit on its life besides.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                process.wait(timeout=3)
    lines = out.decode(errors="replace").splitlines()
    answers = [json.loads(line.partition(MARKER)[2]) for line in lines if MARKER in line]
    if not answers:
        said = [line for line in lines if line.strip(" -")]
        raise NotReached(
            f"The machines could not sum over mpi: {shown(said[0] if said else 'mpirun gave no reason', 120)}."
        )
    return answers


def _output_of(process: subprocess.Popen[bytes], check: Callable[[], None]) -> bytes:
    deadline = time.monotonic() + LINK_S
    while True:
        check()
        try:
            return process.communicate(timeout=POLL_S)[0]
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise NotReached(f"The machines have not summed over mpi within {LINK_S:.0f} s.") from None


def _mpi_command(hosts: HostsFile) -> list[str]:
    """One part for each group of equal hosts, since they may have different programs."""
    words = ["mpirun", "--oversubscribe", *MPI_OPTIONS]
    for number, (host, group) in enumerate(groupby(hosts.hosts, key=_program_of)):
        count = str(len(list(group)))
        words += [":"] if number else []
        variables = {**rank_environment(host), **dict(entry.split("=", 1) for entry in hosts.envs)}
        program = [*(f"{name}={value}" for name, value in variables.items()), *rank_program(host, LINK)]
        words += ["-np", count, "--host", f"{host.ssh}:{count}", "sh", "-c", f"exec env {shell_words(program)}"]
    return words


def _program_of(host: Host) -> Host:
    return Host(host.ssh, program=host.program, folder=host.folder)
