"""Seconds of a sum, by rate, latency, ranks, backend and size, over links between network namespaces."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from backend.bench.network.delay import two_machines_apart
from backend.bench.network.links import DEVICE, NamedMachine, can_shape, machines_on_a_switch
from backend.bench.network.steps import RATES, measure_steps
from backend.spec.machine import processor

ROOT = Path(__file__).resolve().parents[3]
PORT = 29_400
TIMEOUT_S = 300.0
RING_OF_OPEN_MPI = "4"
"""Its own choice sends twice the bytes with three ranks."""


KB, MB = 1000, 1_000_000
LORA = 20_185_088
"""Bytes of the gradient of rank-8 adapters on every linear layer of Qwen3-0.6B: 28 layers of 180,224 numbers, float32."""


@dataclass(frozen=True, slots=True)
class Link:
    """What is measured on it: `ranks` machines over a switch, or two at a distance of `latency_s`, one way, over a relay."""

    backend: str
    ranks: int
    bits_per_second: float | None
    latency_s: float
    sizes: tuple[int, ...]


LINKS = (
    Link("ring", 2, 8e6, 0.0, (4, 64 * KB, 256 * KB, MB)),
    Link("ring", 2, 1e8, 0.0, (4, 64 * KB, 256 * KB, MB, 4 * MB, LORA)),
    Link("ring", 2, 1e9, 0.0, (4, MB, 4 * MB, LORA, 64 * MB)),
    Link("ring", 2, 1e10, 0.0, (4, LORA, 64 * MB)),
    *(Link("ring", 2, 1e8, latency, (4, 64 * KB, 256 * KB, MB, 4 * MB)) for latency in (0.25e-3, 0.5e-3, 1e-3)),
    *(Link("mpi", ranks, 1e8, 0.0, (4, 64 * KB, MB, 4 * MB, LORA)) for ranks in (2, 3, 4)),
    *(Link("mpi", ranks, 1e9, 0.0, (4, MB, 4 * MB, LORA)) for ranks in (2, 3, 4)),
)


def measure_link(link: Link) -> list[dict[str, Any]]:
    """A row for each size: the link's fields and the sums' (quartiles and median of the seconds, bytes that rank 0 sent), the machine's load."""
    if link.latency_s:
        assert link.bits_per_second is not None
        machines = two_machines_apart(link.latency_s, link.bits_per_second)
    else:
        machines = machines_on_a_switch(link.ranks, link.bits_per_second)
    about = {key: value for key, value in asdict(link).items() if key != "sizes"} | {"load": os.getloadavg()[0]}
    with machines as there:
        return [about | row for row in measure_sums(link.backend, there, link.sizes)]


def measure_all(lock: Path | None) -> dict[str, Any]:
    """Measure every link, some minutes in all: {"about": the machine, "points": a row for each size, "steps": a row for each rate}.
    `lock` is held while a link is measured, for others that share the machine and measure too. Raises RuntimeError where links cannot be
    made here."""
    if not can_shape():
        raise RuntimeError("Links between network namespaces need Linux, root, ip and tc.")
    points: list[dict[str, Any]] = []
    for link in LINKS:
        with _alone(lock):
            points += measure_link(link)
        print(f"{len(points)} points, load {os.getloadavg()[0]:.1f}: {points[-1]}", flush=True)
    steps: list[dict[str, Any]] = []
    for rate in RATES:
        with _alone(lock):
            steps.append(measure_steps(rate))
        print(f"steps, load {os.getloadavg()[0]:.1f}: {steps[-1]}", flush=True)
    rounded = [{key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in point.items()} for point in points]
    return {
        "about": {"machine": f"{processor()}, {os.cpu_count()} cores", "mlx": version("mlx")},
        "points": rounded,
        "steps": steps,
    }


@contextlib.contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    with lock.open("w") if lock else contextlib.nullcontext() as held:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def measure_sums(backend: str, machines: Sequence[NamedMachine], sizes: Sequence[int]) -> Iterator[dict[str, float]]:
    """One rank on each machine; → a row for each size. Raises RuntimeError where a rank fails."""
    program = [sys.executable, "-P", "-m", "backend.bench.network.sums", backend, *map(str, sizes)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        start = _ring if backend == "ring" else _mpi
        ranks = start(Path(folder), machines, program, environment)
        try:
            out, said = ranks[0].communicate(timeout=TIMEOUT_S)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if len(rows) < len(sizes):  # mpirun's exit code says nothing: mlx never calls MPI_Finalize
        raise RuntimeError(f"{backend} with {len(machines)} ranks: {said.strip()[-2000:]}")
    yield from rows


def _ring(
    folder: Path, machines: Sequence[NamedMachine], program: list[str], environment: dict[str, str]
) -> list[subprocess.Popen[str]]:
    hosts = folder / "ring.json"
    hosts.write_text(json.dumps([[f"{machine.address}:{PORT}"] for machine in machines]))
    return [
        _process(machine.command(program), environment | {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)})
        for rank, machine in enumerate(machines)
    ]


def _mpi(
    folder: Path, machines: Sequence[NamedMachine], program: list[str], environment: dict[str, str]
) -> list[subprocess.Popen[str]]:
    agent = folder / "agent"
    names = {machine.address.rpartition(".")[2]: machine.namespace for machine in machines}
    cases = "\n".join(f"{last}) namespace={name};;" for last, name in names.items())
    agent.write_text(
        f'#!/bin/sh\n[ "$1" = -x ] && shift\nlast=${{1##*.}}; shift\ncase $last in\n{cases}\nesac\n'
        'exec ip netns exec $namespace unshare --uts sh -c "hostname machine-$last; $*"\n'
    )
    agent.chmod(0o755)
    options = {
        "plm_rsh_agent": str(agent), "btl": "self,tcp", "btl_tcp_if_include": DEVICE, "oob_tcp_if_include": DEVICE,
        "mpi_yield_when_idle": "1", "plm_rsh_no_tree_spawn": "1", "coll_tuned_use_dynamic_rules": "1",
        "coll_tuned_allreduce_algorithm": RING_OF_OPEN_MPI,
    }  # fmt: skip
    words = [word for key, value in options.items() for word in ("--mca", key, value)]
    hosts = ",".join(machine.address for machine in machines)
    run = [
        "mpirun",
        *words,
        "--bind-to",
        "none",
        "--enable-recovery",
        "-x",
        "PYTHONPATH",
        "--host",
        hosts,
        "-np",
        str(len(machines)),
        *program,
    ]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [_process(machines[0].command(run), environment | allowed)]


def _process(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
