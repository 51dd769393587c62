"""Pins Python's thread and mlx's to one core while they work together, where mlx computes on a Linux CPU.

There mlx hands every operation to a thread of its own, which sleeps whenever it has none. A decoding step is hundreds of
operations of some ten microseconds. On two cores, each may have to wake the other core and to fetch from its cache what was
just written, which costs as much as the operation. Some systems keep the two threads together by themselves, others only
sometimes. Only these two threads are pinned, and only while they work: rewards, saving and tokenising have the other cores.

The scheduling policy stays the usual one, under which a woken thread goes first: above its memory limit mlx waits for its
thread in a loop, and under SCHED_BATCH that loop would keep the core.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import mlx.core as mx

from backend.engine.cpu import blas
from backend.engine.device import on_cpu

MIN_CPU_SHARE = 0.7
"""CPU seconds per second below which another process uses the core too, and another core is taken next time."""

MIN_DURATION_S = 0.1
"""Shorter measurements are ignored: a single wait would look like a shared core."""

TASKS = Path("/proc/self/task")
_other_core: list[int] = []
"""The core to take next time; empty: the core that the calling thread runs on."""


@contextmanager
def on_one_core() -> Iterator[None]:
    """The calling thread and mlx's stay on one core inside. Does nothing where mlx computes elsewhere, where its products have
    several threads, or where the system does not allow it."""
    threads = _threads()
    allowed = [os.sched_getaffinity(thread) for thread in threads]
    if not threads or len(allowed[0]) == 1:
        yield
        return
    # The core that the thread is on has its data in cache already; another is taken only after `_leave_shared_core`.
    core = _other_core.pop() if _other_core else _core_of(threads[0])
    core = core if core in allowed[0] else min(allowed[0])
    before = time.perf_counter(), _cpu_seconds(threads)
    try:
        for thread in threads:
            _pin(thread, {core})
        yield
    finally:
        # Each thread's own set: mlx's thread need not have been allowed the same cores as Python's.
        for thread, cores in zip(threads, allowed, strict=True):
            _pin(thread, cores)
        _leave_shared_core(core, allowed[0], time.perf_counter() - before[0], _cpu_seconds(threads) - before[1])


def _threads() -> list[int]:
    """The calling thread and mlx's, by the system's thread ids; empty where pinning does not apply."""
    if sys.platform != "linux" or not on_cpu() or os.environ.get(blas.THREADS) != "1":
        return []
    threads = [threading.get_native_id(), *_mlx_threads()]
    return threads if len(threads) == 2 else []


@cache
def _mlx_threads() -> list[int]:
    """mlx's CPU thread id, in a list: the thread that is not Python's and wakes up for every operation. Empty where /proc lacks
    the files that this module reads, as in some sandboxes."""
    mx.eval(mx.array(0) + 1)  # mlx starts its thread with the first operation
    # This thread's id is asked for: in a fork, Python still gives the one that it had before.
    python_threads = {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}
    others = [int(task.name) for task in TASKS.iterdir() if int(task.name) not in python_threads]
    before = {task: _voluntary_switches(task) for task in others}
    # mlx has no call that names its thread. An idle one sleeps (a voluntary switch) after each of these operations; threads of
    # a BLAS or of Qt do not.
    tries = 20
    for number in range(tries):
        mx.eval(mx.array(number) + 1)
    woken = {task: _voluntary_switches(task) - before[task] for task in others}
    thread = max(woken, key=lambda task: woken[task], default=0)
    try:
        # Read once at the start, so that `on_one_core` cannot fail later on a file that does not exist here.
        _cpu_seconds([thread]), _core_of(thread)
    except (OSError, ValueError, IndexError):
        return []
    return [thread] if woken[thread] > tries // 2 else []


def _leave_shared_core(core: int, allowed: set[int], wall_s: float, cpu_s: float) -> None:
    """Take another core next time, at random, if this one was shared: else two runs could share a core for ever."""
    if wall_s > MIN_DURATION_S and cpu_s < MIN_CPU_SHARE * wall_s:
        # From the system's entropy, not the run's seed: two runs with one seed would choose the same core again.
        _other_core[:] = [random.SystemRandom().choice(sorted(allowed - {core}))]


def _pin(thread: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:
        return  # some containers forbid it: everything works there, as fast as without


def _core_of(thread: int) -> int:
    """The core that it runs on now: field 39 of proc_pid_stat(5), the second of which may hold spaces."""
    return int((TASKS / str(thread) / "stat").read_text().rpartition(")")[2].split()[36])


def _voluntary_switches(thread: int) -> int:
    """How often it has gone to sleep; 0 for a thread that has ended meanwhile, and where the system does not count it."""
    try:
        words = (TASKS / str(thread) / "status").read_text().split()
        return int(words[words.index("voluntary_ctxt_switches:") + 1])
    except (OSError, ValueError):
        return 0


def _cpu_seconds(threads: list[int]) -> float:
    """Seconds that these threads have run."""
    return sum(int((TASKS / str(thread) / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
