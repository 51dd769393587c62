"""Stop signals to a rank other than 0."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from backend.distributed.rank_process import STOPPED
from backend.utils.command import backend_environment
from tests.support.rank_runs import RankRuns, processes_of

WORKER = """
import time
from backend.distributed.rank_process import leave_stops_to_leader
leave_stops_to_leader(0.5)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_waits_for_rank_0_to_stop_the_run_and_ends_by_itself_where_it_does_not(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=backend_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        began = time.monotonic()
        for _ in range(3):
            worker.send_signal(number)
        _, said = worker.communicate(timeout=20)
        assert worker.returncode == STOPPED and time.monotonic() - began >= 0.45
        assert said == "a stop signal came, and rank 0 goes on; this process ends.\n"


@pytest.mark.proof
def test_a_signal_to_every_process_of_a_run_is_a_stop(tmp_path: Path) -> None:
    """As mpirun, a batch system and a shutdown send it: the run failed once, because its worker had raised
    KeyboardInterrupt."""
    runs = RankRuns(tmp_path)
    live = runs.train("all", runs.hosts(2), iters=400)
    live.wait_for_step(2)
    for process in [*live.ranks().values(), psutil.Process(live.process.pid)]:
        process.send_signal(signal.SIGINT)
    assert live.wait(60) == 3, live.output.read_text()
    last = live.events()[-1]
    assert last["kind"] == "stopped" and "SIGINT was received" in last["sentence"]
    assert live.saved_step() == live.last_step() >= 2 and not processes_of(live.run)
