"""What a step uses of the machine: memory and cores of the run's processes, and a Mac's GPU as ioreg tells it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.telemetry import ResourceUse, gpu_share
from tests.support import small_run

# The counters of an accelerator in one line, as ioreg writes a dictionary; shortened.
PRINTED = """+-o AGXAcceleratorG14X  <class AGXAcceleratorG14X, id 0x1000003c7, registered, matched, active, busy 0 (0 ms), retain 81>
    {
      "IOClass" = "AGXAcceleratorG14X"
      "PerformanceStatistics" = {"In use system memory (driver)"=0,"Tiler Utilization %"=3,"Device Utilization %"=42,"recoveryCount"=0}
      "gpu-core-count" = 30
    }
"""


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (PRINTED, 0.42),
        (PRINTED + PRINTED.replace("=42", "=97"), 0.97),  # two GPUs: the busier one
        (PRINTED.replace("=42", "=104"), 1.0),
        (PRINTED.replace("Device Utilization %", "Device"), None),
        ("", None),
    ],
)
def test_the_share_of_the_gpu_is_read_from_the_drivers_counters(printed: str, expected: float | None) -> None:
    assert gpu_share(printed) == expected


BUSY = (
    "import time\nheld = bytearray(60_000_000)\nend = time.process_time() + 0.2\nwhile time.process_time() < end: "
    "pass\nprint(1, flush=True)\ntime.sleep(60)"
)


def test_memory_and_cores_are_those_of_the_whole_tree() -> None:
    """A child that holds 60 MB and computes for 0.2 s counts, from its beginning; when it is gone it counts no more."""
    use = ResourceUse()
    use.begin()
    before = use.metrics(1.0)
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        use._look_again = 0.0
        use.begin()
        child.stdout.readline()
        with_child = use.metrics(2.0)
        child.kill()
    assert with_child["process/memory_gb"] > before["process/memory_gb"] + 0.05
    assert with_child["process/cpu_cores"] > 0.15 / 2.0
    use.begin()
    assert use.metrics(1.0)["process/memory_gb"] < with_child["process/memory_gb"] - 0.05
    assert before["machine/swap_gb"] == pytest.approx(psutil.swap_memory().used / 1e9, abs=0.5)


def test_every_step_says_what_it_used(tmp_path: Path, run: RunFolder) -> None:
    small_run.train_here(small_run.settings_for(tmp_path, iters=2), run)
    steps = [event["metrics"] for event in read_events(run.events) if event["kind"] == "step"]
    assert all(0.01 < step["process/memory_gb"] < 50 and 0 < step["process/cpu_cores"] < 200 for step in steps)
    assert all(step["machine/swap_gb"] >= 0 for step in steps)
