"""One rank of a measurement: `python -m backend.bench.network.sums BACKEND BYTES…` joins the others, and rank 0 prints a line of JSON a size.

The sums are those that the trainer makes: one flat float32 vector, evaluated, on the CPU's stream, after a small gather that all have met at.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import mlx.core as mx

from backend.bench.network.links import DEVICE
from backend.run.distributed.collectives import FlatCollectives, init_collectives

SHORTEST_S, FEWEST, MOST = 1.5, 5, 200
"""A size is measured for so many seconds, in so many sums at least and at most."""


def measure(backend: str, sizes: list[int]) -> None:
    ranks = init_collectives(backend)
    for size in sizes:
        vector = mx.ones(max(size // 4, 1))
        mx.eval(vector)
        ranks.all_sum(vector)  # buffers and windows grow in the first
        seconds, sent = _sums_of(vector, ranks)
        if ranks.rank == 0:
            low, middle, high = statistics.quantiles(seconds, n=4)
            row = {
                "bytes": vector.nbytes,
                "low": low,
                "seconds": middle,
                "high": high,
                "sums": len(seconds),
                "sent": sent,
            }
            print(json.dumps(row), flush=True)


def _sums_of(vector: mx.array, ranks: FlatCollectives) -> tuple[list[float], float]:
    """(seconds of each sum, bytes that this rank sent in one, headers included)."""
    seconds: list[float] = []
    sent = 0
    while True:
        ranks.barrier()
        before, began = _sent_so_far(), time.perf_counter()
        ranks.all_sum(vector)
        seconds.append(time.perf_counter() - began)
        sent += _sent_so_far() - before
        # Everybody must stop at the same sum: rank 0 says when.
        done = len(seconds) >= FEWEST and (sum(seconds) > SHORTEST_S or len(seconds) >= MOST)
        if ranks.gather(done)[0]:
            return seconds, sent / len(seconds)


def _sent_so_far() -> int:
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    measure(sys.argv[1], [int(size) for size in sys.argv[2:]])
