"""One rank that does nothing but sums, as a run does them: `python -m tests.support.sums_process BACKEND COUNT FLOATS`.

Prints a line with how many are done every second, and `done` at the end; each sum is checked.
"""

from __future__ import annotations

import os
import sys
import time

import mlx.core as mx

from backend.distributed.collectives import init_collectives


def main(backend: str, count: int, floats: int) -> None:
    ranks = init_collectives(backend)
    own = mx.arange(floats, dtype=mx.float32) % 7 + ranks.rank
    mx.eval(own)
    expected = ranks.size * (mx.arange(floats, dtype=mx.float32) % 7) + sum(range(ranks.size))
    told = began = time.monotonic()
    for done in range(count):
        (total,) = ranks.sum([own])
        if not mx.array_equal(total, expected).item():
            print(f"wrong after {done}", flush=True)
            os._exit(1)
        if ranks.rank == 0 and time.monotonic() - told > 1:
            told = time.monotonic()
            print(done, flush=True)
    if ranks.rank == 0:
        print(f"done {count} in {time.monotonic() - began:.1f} s", flush=True)
    ranks.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
