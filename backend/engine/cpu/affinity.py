"""Python's thread and mlx's on one core, where mlx computes on a Linux CPU.

There mlx hands every operation to a thread of its own, which sleeps whenever it has none. A decoding step is hundreds of
operations of some ten microseconds: spread over two cores, each may have to wake the other core up and to fetch from it what
was just written, which costs as much as the operation. Some systems keep the two together by themselves, some at some times.
Only these two threads are placed, and only for as long as they work: rewards, saving and tokenising have the other cores.

The thread that is woken must go first, as it does by the usual rules: above its memory limit mlx waits for it in a loop, and
under SCHED_BATCH that loop would keep the core.
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
from backend.engine.cpu.vector_exp import on_cpu

CROWDED = 0.7
"""Seconds of work a second below which somebody else works on the core too, and another is taken next time."""

LEAST_S = 0.1
"""Less time than this says nothing about that."""

TASKS = Path("/proc/self/task")
_other_core: list[int] = []
"""The core to take next time; empty: the one that the calling thread is on."""


@contextmanager
def on_one_core() -> Iterator[None]:
    """The calling thread and mlx's stay on one core inside. Does nothing where mlx computes elsewhere, where its products have
    several threads, or where the system does not allow it."""
    threads = _threads()
    homes = [os.sched_getaffinity(thread) for thread in threads]
    if not threads or len(homes[0]) == 1:
        yield
        return
    core = _other_core.pop() if _other_core else _core_of(threads[0])
    core = core if core in homes[0] else min(homes[0])
    before = time.perf_counter(), _worked(threads)
    try:
        for thread in threads:
            _put(thread, {core})
        yield
    finally:
        for thread, home in zip(threads, homes, strict=True):
            _put(thread, home)
        _look_round(core, homes[0], time.perf_counter() - before[0], _worked(threads) - before[1])


def _threads() -> list[int]:
    """The calling thread and mlx's, by the system's numbers; none where they had better be left alone."""
    if sys.platform != "linux" or not on_cpu() or os.environ.get(blas.THREADS) != "1":
        return []
    found = [threading.get_native_id(), *_of_mlx()]
    return found if len(found) == 2 else []


@cache
def _of_mlx() -> list[int]:
    """mlx's thread: none of Python's, and the one that is woken whenever something is to be worked out. None where the system
    does not tell what is asked of it here, as some sandboxes do not."""
    mx.eval(mx.array(0) + 1)  # it is there from the first operation on
    ours = {thread.native_id for thread in threading.enumerate()}
    others = [int(task.name) for task in TASKS.iterdir() if int(task.name) not in ours]
    before = {task: _times_asleep(task) for task in others}
    tries = 20
    for number in range(tries):
        mx.eval(mx.array(number) + 1)
    woken = {task: _times_asleep(task) - before[task] for task in others}
    found = max(woken, key=lambda task: woken[task], default=0)
    try:
        _worked([found]), _core_of(found)
    except (OSError, ValueError, IndexError):
        return []
    return [found] if woken[found] > tries // 2 else []


def _look_round(core: int, home: set[int], passed: float, worked: float) -> None:
    """Whether the core was ours alone; two runs on one core would wait for each other for ever."""
    if passed > LEAST_S and worked < CROWDED * passed:
        _other_core[:] = [random.SystemRandom().choice(sorted(home - {core}))]


def _put(thread: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:
        return  # some containers do not let a program say where it runs: it is as quick there as it would be without


def _core_of(thread: int) -> int:
    """The core that it runs on now: field 39 of proc_pid_stat(5), the first two of which may hold spaces."""
    return int((TASKS / str(thread) / "stat").read_text().rpartition(")")[2].split()[36])


def _times_asleep(thread: int) -> int:
    """0 for a thread that has ended meanwhile, and where the system does not count it."""
    try:
        words = (TASKS / str(thread) / "status").read_text().split()
        return int(words[words.index("voluntary_ctxt_switches:") + 1])
    except (OSError, ValueError):
        return 0


def _worked(threads: list[int]) -> float:
    """Seconds that these threads have run."""
    return sum(int((TASKS / str(thread) / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
