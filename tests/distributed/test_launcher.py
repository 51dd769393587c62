"""The launcher with stand-ins for the ranks: processes with the real control channel and without MLX."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from backend.distributed.hosts_file import Host, HostsFile, parse_hosts
from backend.distributed.launcher import Launch, LaunchEnd, run_ranks, without
from backend.distributed.ranks import Orders
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder

ROOT = Path(__file__).parents[3]


class Bench:
    """A run folder, and how its stand-in ranks are launched."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunFolder(folder / "run")
        self.run.path.mkdir()
        self._monkeypatch = monkeypatch
        self.program = folder / "rank"
        self.program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m tests.support.standin_rank "$@"\n')
        self.program.chmod(0o755)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
        monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")

    def launch(self, size=2, *, backend="ring", wrong: dict | None = None, steps=4, **orders: Any) -> LaunchEnd:
        """`wrong` says by rank what goes wrong there."""
        self._monkeypatch.setenv("GRPO_STUDIO_TEST_RANK", json.dumps(wrong or {}))
        self._monkeypatch.setenv("GRPO_STUDIO_TEST_STEPS", str(steps))
        hosts = HostsFile(tuple(Host("127.0.0.1", ("127.0.0.1",), program=str(self.program)) for _ in range(size)))
        return run_ranks(Launch(self.run, hosts, backend, Orders("train", **orders)))

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run.events) if not kinds or event["kind"] in kinds]

    def pids(self) -> list[int]:
        return [pid for event in self.events("started") for pid in event["pids"]]

    def when_step(self, step: int, work: Callable[[list[int]], None]) -> threading.Thread:
        """Calls `work` with the process ids of the ranks as soon as that step is in the event log."""

        def wait() -> None:
            until = time.monotonic() + 20
            while time.monotonic() < until:
                if any(event["step"] >= step for event in self.events("step")):
                    work(self.pids())
                    return
                time.sleep(0.01)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def left(self) -> list[psutil.Process]:
        """Processes of this run that still live."""
        return [each for each in psutil.process_iter(["cmdline"]) if str(self.run.path) in (each.info["cmdline"] or [])]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, monkeypatch)
    yield made
    left = made.left()
    for each in left:
        each.kill()
    assert not left, "no process is left"


def kill(rank: int) -> Callable[[list[int]], None]:
    return lambda pids: os.kill(pids[rank], signal.SIGKILL)


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (0, "The process of rank 0, on this machine, was killed (signal 9)."),
        (1, "(rank 1) hung up: its process has ended. What it printed: ranks/rank-1.log in the run folder."),
    ],
)
def test_a_killed_rank_ends_the_run_and_is_named(bench: Bench, rank: int, says: str) -> None:
    thread = bench.when_step(2, kill(rank))
    end = bench.launch(steps=400)
    thread.join()
    last = bench.events()[-1]
    assert (end.kind, end.exit_code, last["kind"]) == ("failed", 2, "failed")
    assert says in last["sentence"] and len(last["sentence"]) < 200 and (rank or last["step"] >= 2)


def test_the_last_one_goes_on_alone(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    thread = bench.when_step(3, kill(1))
    end = bench.launch(2, steps=12, goes_on=True)
    thread.join()
    assert end == LaunchEnd("finished", 0) and bench.events()[-1]["kind"] == "finished"
    assert [event["ranks"] for event in bench.events("started")] == [2, 1]
    assert "rank 0 has ended" in capfd.readouterr().out, "what rank 0 prints is the launcher's output"
    assert (bench.run.path / "ranks" / "rank-1.log").read_text() == "this worker works\n"


def test_a_stop_of_the_launcher_is_a_stop_of_rank_0(bench: Bench) -> None:
    thread = bench.when_step(2, lambda pids: os.kill(os.getpid(), signal.SIGTERM))
    end = bench.launch(steps=400)
    thread.join()
    assert (end.kind, end.exit_code) == ("stopped", 3) and bench.events()[-1]["kind"] == "stopped"


def test_a_rank_that_does_not_start_is_told_with_its_last_words(bench: Bench) -> None:
    end = bench.launch(wrong={1: "crash at start"})
    assert end.exit_code == 2
    assert "ended before the run began: no such library" in bench.events()[-1]["sentence"]


needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")


@needs_mpi
@pytest.mark.proof
def test_three_ranks_of_mpirun_train_to_the_end(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.launch(3, backend="mpi") == LaunchEnd("finished", 0)
    out = capfd.readouterr().out
    assert "rank 0 has ended" in out and "works" not in out and "pid" not in out
    logs = [(bench.run.path / "ranks" / f"rank-{rank}.log").read_text() for rank in (1, 2)]
    assert logs == ["this worker works\n"] * 2


def test_a_machine_is_left_out_with_the_devices_that_lead_to_it() -> None:
    hosts = parse_hosts(
        [{"ssh": name, "rdma": [None if other == name else f"to_{other}" for other in "abc"]} for name in "abc"], "f"
    )
    left = without(hosts, 1)
    assert [host.ssh for host in left.hosts] == ["a", "c"]
    assert [host.rdma for host in left.hosts] == [(None, "to_c"), ("to_a", None)]
    assert without(HostsFile((Host("a"), Host("b"))), 1).hosts == (Host("a"),)
