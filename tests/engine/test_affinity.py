"""Python's thread and mlx's on one core while they sample and learn; nobody else, and not a moment longer."""

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

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="one core of several, on Linux"
)


@pytest.fixture(autouse=True)
def _as_it_was():
    affinity._other_core.clear()
    yield
    affinity._other_core.clear()


def placed(thread: int) -> set[int]:
    return os.sched_getaffinity(thread)


def both() -> list[int]:
    return [threading.get_native_id(), *affinity._of_mlx()]


def test_the_other_thread_is_the_one_that_multiplies():
    (found,) = affinity._of_mlx()
    ours = {thread.native_id for thread in threading.enumerate()}
    others = [int(task.name) for task in affinity.TASKS.iterdir() if int(task.name) not in ours | {found}]
    x = mx.random.normal((1024, 1024))
    mx.eval(x)
    before = affinity._worked([found]), affinity._worked(others)
    mx.eval(x @ x @ x @ x)
    assert affinity._worked([found]) - before[0] > 10 * (affinity._worked(others) - before[1])


def test_both_stand_on_one_core_and_go_home_again():
    home = [placed(thread) for thread in both()]
    with on_one_core():
        inside = [placed(thread) for thread in both()]
    assert inside[0] == inside[1] and len(inside[0]) == 1
    with pytest.raises(KeyError), on_one_core():
        raise KeyError
    assert [placed(thread) for thread in both()] == home


def test_other_threads_and_what_they_start_keep_all_cores():
    count = "import os; print(len(os.sched_getaffinity(0)))"
    asked, told = threading.Event(), []

    def beside() -> None:
        asked.wait(20)
        told.append(len(os.sched_getaffinity(0)))
        told.append(int(subprocess.check_output([sys.executable, "-c", count])))

    thread = threading.Thread(target=beside)
    thread.start()
    with on_one_core():
        asked.set()
        thread.join(20)
    assert told == [len(os.sched_getaffinity(0))] * 2


def test_a_core_that_somebody_else_works_on_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(affinity, "LEAST_S", 0.0)

    def core(worked: Callable[[float], float]) -> int:
        began, before = time.perf_counter(), iter([0.0])
        monkeypatch.setattr(affinity, "_worked", lambda _: next(before, None) or worked(time.perf_counter() - began))
        with on_one_core():
            (found,) = os.sched_getaffinity(0)
            time.sleep(0.05)
        return found

    crowded = core(lambda passed: 0.3 * passed)
    assert core(lambda passed: passed) != crowded
    assert affinity._other_core == [], "a core of its own is not left"


@pytest.mark.parametrize("why", ["threads of the BLAS", "a GPU", "one core allowed"])
def test_where_it_does_not_help_nothing_is_placed(monkeypatch: pytest.MonkeyPatch, why: str):
    home = os.sched_getaffinity(0)
    if why == "threads of the BLAS":
        monkeypatch.setenv(blas.THREADS, "4")
    elif why == "a GPU":
        monkeypatch.setattr(affinity, "on_cpu", lambda: False)
    else:
        os.sched_setaffinity(0, {min(home)})
    before = [placed(thread) for thread in both()]
    try:
        with on_one_core():
            assert [placed(thread) for thread in both()] == before
    finally:
        os.sched_setaffinity(0, home)


@pytest.mark.parametrize("missing", ["status", "schedstat", "stat"])
def test_a_system_that_does_not_tell_is_no_error(monkeypatch: pytest.MonkeyPatch, missing: str):
    read = Path.read_text

    def refuse(path: Path, *how: object) -> str:
        if path.name == missing and "task" in path.parts:
            raise FileNotFoundError(path)
        return read(path, *how)

    monkeypatch.setattr(Path, "read_text", refuse)
    affinity._of_mlx.cache_clear()
    home = os.sched_getaffinity(0)
    try:
        with on_one_core():
            assert os.sched_getaffinity(0) == home
    finally:
        affinity._of_mlx.cache_clear()


def test_a_system_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with on_one_core():
        pass
