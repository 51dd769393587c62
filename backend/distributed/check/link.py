"""How fast the ranks sum: measured by every rank together, on the CPU's stream, as a run sums its gradients.

`python -m backend machine-link` is a rank that `mpirun` started; the probe (`backend.distributed.check.probe`) measures for the other
backends. A sum that never ends is the caller's to notice: every process has a limit on its life.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from backend.distributed.machine_report import LinkSpeed

LIFETIME_S = 60.0
LATENCY_SUMS = 21
LARGE_BYTES = 32_000_000
LARGE_SUMS = 3
SMALL_FOR_SLOW = 1_000_000
"""Bytes of the first large sum; where it alone takes longer than SLOW_S, no larger one follows."""
SLOW_S = 1.0


def main() -> int:
    """A rank of MPI: rank 0 prints the answer of `measure`, as the probe does."""
    from backend.distributed.check.machine_verbs import MARKER, end_after
    from backend.utils.child_process import claim_stdout, json_line

    out = claim_stdout()
    end_after(LIFETIME_S)
    answer = measure("mpi", {}, {})
    if answer["rank"] == 0:
        out.write(MARKER + json_line(answer))
        out.flush()
    return 0


def measure(backend: str, variables: Mapping[str, str], files: Mapping[str, str]) -> dict[str, Any]:
    """{"rank", "size", "speed"} as this rank measures it. `variables` and `files`: `backend.distributed.hosts_file`.

    Every rank calls it at the same time. Raises RuntimeError where the ranks do not find each other.
    """
    os.environ |= variables
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = os.path.join(folder, name)
            with open(path, "w", encoding="utf-8") as file:
                file.write(content)
            os.environ[name] = path
        import mlx.core as mx

        group = mx.distributed.init(backend=backend.removesuffix("-ring"), strict=True)
    speed = _speed(group)
    return {"rank": group.rank(), "size": group.size(), "speed": asdict(speed)}


def _speed(group: Any) -> LinkSpeed:
    import mlx.core as mx

    def sum_s(values: int) -> float:
        """Seconds of one sum of float32 values."""
        array = mx.ones(values)
        mx.eval(array)
        began = time.perf_counter()
        mx.eval(mx.distributed.all_sum(array, group=group, stream=mx.cpu))
        return time.perf_counter() - began

    sum_s(1)  # the first one connects
    latency = statistics.median(sum_s(1) for _ in range(LATENCY_SUMS))
    size = SMALL_FOR_SLOW
    # All ranks must take the same branch, so the slowest of them decides.
    slowest = _floats(mx.distributed.all_max(mx.array([sum_s(size // 4)]), group=group, stream=mx.cpu))[0]
    if slowest < SLOW_S:
        size = LARGE_BYTES
        slowest = min(sum_s(size // 4) for _ in range(LARGE_SUMS))
    return LinkSpeed(latency, size / slowest, _between_neighbours(group, size))


def _between_neighbours(group: Any, size: int) -> tuple[tuple[int, int, float], ...]:
    """One large array from each rank to the next, and back: a connection may be slow in one direction. On every rank the receiver's time."""
    import mlx.core as mx

    rank, count = group.rank(), group.size()
    array = mx.ones(size // 4)
    mx.eval(array)
    pairs = [(index, (index + 1) % count) for index in range(count if count > 2 else count - 1)]
    seconds = mx.zeros(2 * len(pairs))
    for place, (sender, receiver) in enumerate([*pairs, *((to, of) for of, to in pairs)]):
        mx.eval(mx.distributed.all_sum(mx.ones(1), group=group, stream=mx.cpu))  # begin together
        began = time.perf_counter()
        if rank == sender:
            mx.eval(mx.distributed.send(array, receiver, group=group, stream=mx.cpu))
        elif rank == receiver:
            mx.eval(mx.distributed.recv_like(array, sender, group=group, stream=mx.cpu))
            seconds[place] = time.perf_counter() - began
    told = _floats(mx.distributed.all_sum(seconds, group=group, stream=mx.cpu))
    both = [*pairs, *((to, of) for of, to in pairs)]
    return tuple((of, to, size / taken) for (of, to), taken in zip(both, told, strict=True) if taken > 0)


def _floats(array: Any) -> list[float]:
    return array.tolist()


if __name__ == "__main__":
    sys.exit(main())
