"""Stop signals to a rank other than 0."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from backend.distributed.ranks import STOPPED
from backend.utils.command import backend_environment

WORKER = """
import time
from backend.distributed.ranks import leave_stops_to_leader
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
