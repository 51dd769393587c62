"""Python's thread and mlx's share one core while they sample and train; other threads keep all cores."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import mlx.core as mx
import pytest

from backend.engine import cpu
from backend.engine.cpu import on_one_core

HAS_CORES = sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1
pytestmark = [pytest.mark.skipif(not HAS_CORES, reason="one core of several, on Linux")]
pytestmark += [pytest.mark.usefixtures("as_on_a_cpu")]


@pytest.fixture(autouse=True)
def no_core_chosen():
    cpu._other_core.clear()
    yield
    cpu._other_core.clear()


def both_threads() -> list[int]:
    return [threading.get_native_id(), *cpu._mlx_threads()]


def test_the_detected_mlx_thread_is_the_one_that_multiplies():
    (mlx_thread,) = cpu._mlx_threads()
    python_threads = {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}
    others = [int(task.name) for task in cpu.TASKS.iterdir() if int(task.name) not in python_threads | {mlx_thread}]
    x = mx.random.normal((1024, 1024))
    mx.eval(x)
    before = cpu._cpu_seconds([mlx_thread]), cpu._cpu_seconds(others)
    mx.eval(x @ x @ x @ x)
    assert cpu._cpu_seconds([mlx_thread]) - before[0] > 10 * (cpu._cpu_seconds(others) - before[1])


def test_both_threads_are_on_one_core_inside_and_unpinned_afterwards():
    home = [os.sched_getaffinity(thread) for thread in both_threads()]
    with on_one_core():
        inside = [os.sched_getaffinity(thread) for thread in both_threads()]
    assert inside[0] == inside[1] and len(inside[0]) == 1
    with pytest.raises(KeyError), on_one_core():
        raise KeyError
    assert [os.sched_getaffinity(thread) for thread in both_threads()] == home


def test_a_core_that_another_process_uses_is_not_taken_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu, "MIN_DURATION_S", 0.0)

    def core_taken(cpu_seconds: Callable[[float], float]) -> int:
        began, before = time.perf_counter(), iter([0.0])
        monkeypatch.setattr(cpu, "_cpu_seconds", lambda _: next(before, 0) or cpu_seconds(time.perf_counter() - began))
        with on_one_core():
            (core,) = os.sched_getaffinity(0)
            time.sleep(0.05)
        return core

    shared = core_taken(lambda passed: 0.3 * passed)
    assert core_taken(lambda passed: passed) != shared
    assert cpu._other_core == [], "a core that is not shared is kept"
