"""Python's thread and mlx's share one core while they sample and train. Other threads keep all cores, and so do these two afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from backend.engine.cpu import affinity, blas
from backend.engine.cpu.affinity import on_one_core

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="one core of several, on Linux"
    ),
    pytest.mark.usefixtures("as_on_a_cpu"),
]


@pytest.fixture(autouse=True)
def no_core_chosen():
    affinity._other_core.clear()
    yield
    affinity._other_core.clear()


def allowed_cores(thread: int) -> set[int]:
    return os.sched_getaffinity(thread)


def both_threads() -> list[int]:
    return [threading.get_native_id(), *affinity._mlx_threads()]


def test_the_detected_mlx_thread_is_the_one_that_multiplies():
    (mlx_thread,) = affinity._mlx_threads()
    python_threads = {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}
    others = [
        int(task.name) for task in affinity.TASKS.iterdir() if int(task.name) not in python_threads | {mlx_thread}
    ]
    x = mx.random.normal((1024, 1024))
    mx.eval(x)
    before = affinity._cpu_seconds([mlx_thread]), affinity._cpu_seconds(others)
    mx.eval(x @ x @ x @ x)
    assert affinity._cpu_seconds([mlx_thread]) - before[0] > 10 * (affinity._cpu_seconds(others) - before[1])


def test_both_threads_are_on_one_core_inside_and_unpinned_afterwards():
    home = [allowed_cores(thread) for thread in both_threads()]
    with on_one_core():
        inside = [allowed_cores(thread) for thread in both_threads()]
    assert inside[0] == inside[1] and len(inside[0]) == 1
    with pytest.raises(KeyError), on_one_core():
        raise KeyError
    assert [allowed_cores(thread) for thread in both_threads()] == home


def test_other_threads_and_their_child_processes_keep_all_cores():
    count = "import os; print(len(os.sched_getaffinity(0)))"
    pinned, counts = threading.Event(), []

    def other_thread() -> None:
        pinned.wait(20)
        counts.append(len(os.sched_getaffinity(0)))
        counts.append(int(subprocess.check_output([sys.executable, "-c", count])))

    thread = threading.Thread(target=other_thread)
    thread.start()
    with on_one_core():
        pinned.set()
        thread.join(20)
    assert counts == [len(os.sched_getaffinity(0))] * 2


def test_a_core_that_another_process_uses_is_not_taken_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(affinity, "MIN_DURATION_S", 0.0)

    def core_taken(cpu_seconds: Callable[[float], float]) -> int:
        began, before = time.perf_counter(), iter([0.0])
        monkeypatch.setattr(
            affinity, "_cpu_seconds", lambda _: next(before, None) or cpu_seconds(time.perf_counter() - began)
        )
        with on_one_core():
            (core,) = os.sched_getaffinity(0)
            time.sleep(0.05)
        return core

    shared = core_taken(lambda passed: 0.3 * passed)
    assert core_taken(lambda passed: passed) != shared
    assert affinity._other_core == [], "a core that is not shared is kept"


@pytest.mark.parametrize("why", ["threads of the BLAS", "a GPU", "one core allowed"])
def test_no_thread_is_pinned_where_it_does_not_help(monkeypatch: pytest.MonkeyPatch, why: str):
    home = os.sched_getaffinity(0)
    if why == "threads of the BLAS":
        monkeypatch.setenv(blas.THREADS, "4")
    elif why == "a GPU":
        monkeypatch.setattr(affinity, "on_cpu", lambda: False)
    else:
        os.sched_setaffinity(0, {min(home)})
    before = [allowed_cores(thread) for thread in both_threads()]
    try:
        with on_one_core():
            assert [allowed_cores(thread) for thread in both_threads()] == before
    finally:
        os.sched_setaffinity(0, home)


@pytest.mark.parametrize("missing", ["status", "schedstat", "stat"])
def test_a_system_that_hides_a_file_of_proc_is_no_error(monkeypatch: pytest.MonkeyPatch, missing: str):
    read = Path.read_text

    def refuse(path: Path, *how: object) -> str:
        if path.name == missing and "task" in path.parts:
            raise FileNotFoundError(path)
        return read(path, *how)

    monkeypatch.setattr(Path, "read_text", refuse)
    affinity._mlx_threads.cache_clear()
    home = os.sched_getaffinity(0)
    try:
        with on_one_core():
            assert os.sched_getaffinity(0) == home
    finally:
        affinity._mlx_threads.cache_clear()


def test_a_system_that_forbids_pinning_is_no_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with on_one_core():
        pass
