"""What a step records beside its metrics: time and peak memory by phase, the use of the machine, tokens. A Mac is kept
awake while a run works, and heat is noted.

The caffeinate here is a script that behaves like Apple's: it ends with the process that -w names.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

from backend.runs import checkpoint
from backend.runs.checkpoint import arrays_of
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer import machine
from backend.trainer.machine import IS_COOL, IS_HOT, POWER_SETTINGS, THERMAL_LEVEL, SlowdownWatch
from backend.trainer.telemetry import ResourceUse, StepTimer, gpu_share
from tests.support import small_run
from tests.support.cases import cases


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_and_the_rest_add_up_to_the_step() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    course = [("rollout", 3.0, 0.5), ("reward", 1.0, 0.0), ("rollout", 2.0, 0.25), ("train", 4.0, 1.0)]
    for phase, inside, after in course:
        with timer.phase(phase):
            clock.now += inside
        clock.now += after
    seconds = timer.metrics()
    assert (seconds["time/rollout"], seconds["time/reward"], seconds["time/train"]) == (5.0, 1.0, 4.0)
    assert (seconds["time/other"], seconds["time/step"], timer.elapsed()) == (1.75, 11.75, 11.75)
    assert timer.rate(50, "rollout") == 10


def megabytes(count: int) -> None:
    mx.eval(mx.zeros((count, 250_000)) + 1)


def test_peak_memory_is_measured_by_phase_and_overall() -> None:
    timer = StepTimer(Clock())
    before = mx.get_active_memory() / 1e9
    with timer.phase("rollout"):
        megabytes(20)
    megabytes(60)
    with timer.phase("train"):
        megabytes(40)
    with timer.phase("rollout"):
        megabytes(10)
    peaks = {name: value - before for name, value in timer.metrics().items() if name.startswith("peak")}
    assert peaks["peak_memory_gb/rollout"] == pytest.approx(0.020, abs=0.003)
    assert peaks["peak_memory_gb/train"] == pytest.approx(0.040, abs=0.003)
    assert peaks["peak_memory_gb"] == pytest.approx(0.060, abs=0.003)


# The counters of an accelerator in one line, as ioreg writes a dictionary; shortened.
PRINTED = """+-o AGXAcceleratorG14X  <class AGXAcceleratorG14X, id 0x1000003c7, registered, matched, active, \
busy 0 (0 ms), retain 81>
    {
      "IOClass" = "AGXAcceleratorG14X"
      "PerformanceStatistics" = {"In use system memory (driver)"=0,"Tiler Utilization %"=3,\
"Device Utilization %"=42,"recoveryCount"=0}
      "gpu-core-count" = 30
    }
"""


@cases(
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


CLIPPING: dict[str, Any] = {"iters": 2, "batch_size": 2, "group_size": 4, "num_iterations": 2}
CLIPPING |= {"learning_rate": 2e-3, "epsilon": 1e-3, "max_completion_length": 10, "skip_zero_signal": False}
CLIPPING |= {"temperature": 0.9}
"""Two updates a step: in the second the ratios have left 1, and so tight a range clips many of them."""


def trained(folder: Path, name: str, **changes: Any) -> RunFolder:
    raw = small_run.settings_for(folder, **CLIPPING | small_run.low_half(folder) | changes)
    return small_run.trained(raw, RunFolder(folder / "runs" / name))


def completions(run: RunFolder, step: int) -> list[dict[str, Any]]:
    return [completion for row in small_run.rows(run) if row["step"] == step for completion in row["completions"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunFolder]:
    """The same run twice: not recorded, and recorded."""
    folder = tmp_path_factory.mktemp("tokens")
    return trained(folder, "off"), trained(folder, "on", record_tokens=True)


def test_recording_changes_no_weight_and_no_other_part_of_a_row(runs: tuple[RunFolder, RunFolder]) -> None:
    off, on = (checkpoint.newest(run) for run in runs)
    assert off is not None and on is not None
    first, second = arrays_of(off, "weights"), arrays_of(on, "weights")
    assert all(np.array_equal(np.array(first[name]), np.array(second[name])) for name in first | second)
    plain, recorded = (completions(run, 2) for run in runs)
    assert not any("token_data" in row for row in plain)
    assert plain == [{key: x for key, x in row.items() if key != "token_data"} for row in recorded]


def test_the_numbers_are_those_of_the_loss(runs: tuple[RunFolder, RunFolder]) -> None:
    run, (_, metrics) = runs[1], small_run.metrics(runs[1])
    data = [row["token_data"] for row in completions(run, 2)]
    clipped = [x for tokens in data for x in tokens["clipped"]]
    # A step's metric is the mean over its two updates, and in the first nothing is clipped: the ratio is exactly 1.
    assert 0 < sum(clipped) / len(clipped) == pytest.approx(2 * metrics["clip_ratio_total"], rel=1e-6)
    # The sampler's policy is that of the first update, so π_θ / π_old is the ratio of the two log-probabilities.
    for tokens in data:
        ratios = np.exp(np.array(tokens["learned_logp"]) - np.array(tokens["logp"]))
        np.testing.assert_allclose(tokens["ratio"], ratios, rtol=1e-4)
    assert max(abs(math.log(x)) for tokens in data for x in tokens["ratio"]) > 1e-3, "those of the second update"


def test_token_texts_make_up_the_completion(runs: tuple[RunFolder, RunFolder]) -> None:
    for row in completions(runs[1], 1):
        assert "".join(row["token_data"]["text"]).startswith(row["text"])
        assert {len(values) for values in row["token_data"].values()} == {row["tokens"]}


SCRIPT = """#!/bin/sh
echo "$$ $*" >> "$0.started"
while kill -0 "$3" 2>/dev/null; do sleep 0.02; done
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Mac with this caffeinate; the file that it writes a line to as it starts: its pid and its arguments."""
    program = tmp_path / "bin" / "caffeinate"
    program.parent.mkdir()
    program.write_text(SCRIPT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform="darwin"))
    return program.with_name("caffeinate.started")


def calls(started: Path) -> list[tuple[int, str]]:
    lines = started.read_text().splitlines() if started.exists() else []
    return [(int(pid), arguments) for pid, _, arguments in (line.partition(" ") for line in lines)]


def is_alive(pid: int) -> bool:
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()[
        :1
    ] not in ("", "Z")


def until(condition: Callable[[], Any]) -> bool:
    for _ in range(250):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_killed_trainer_leaves_no_mac_awake(started: Path) -> None:
    code = (
        "import sys, time\n"
        "from backend.trainer.machine import KeepAwake\n"
        "sys.platform = 'darwin'\n"
        "KeepAwake().start()\n"
        "time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    assert until(lambda: calls(started))
    ((pid, arguments),) = calls(started)
    assert arguments == f"-is -w {child.pid}" and is_alive(pid)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert until(lambda: not is_alive(pid))


def test_a_run_holds_it_while_it_works_and_not_in_a_pause(tmp_path: Path, run: RunFolder, started: Path) -> None:
    alive: dict[str, list[bool]] = {}

    def echo(event: dict[str, Any]) -> None:
        pids = [pid for pid, _ in calls(started)]
        if event["kind"] == "step":
            assert until(lambda: len(calls(started)) == (1 if event["step"] == 1 else 2))
            alive[f"step {event['step']}"] = [is_alive(pid) for pid, _ in calls(started)]
            if event["step"] == 1:
                run.say("pause")
        elif event.get("phase") == "paused":
            alive["paused"] = [is_alive(pid) for pid in pids]
            run.say("resume")

    assert small_run.train_here(small_run.settings_for(tmp_path, iters=2), run, echo).kind == "finished"
    assert alive == {"step 1": [True], "paused": [False], "step 2": [False, True]}
    assert not any(is_alive(pid) for pid, _ in calls(started))
    assert not [event for event in read_events(run.events) if event.get("level") == "warning"]


DESKTOP = "System-wide power settings:\nCurrently in use:\n sleep                1\n"
LEVEL = "com.apple.system.thermalpressurelevel {}\n"


class Mac:
    """What the two commands print, one reading after the other, a minute apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.level, self.settings, self.reads = 1000.0, 0, DESKTOP, 0
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(machine.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(machine, "printed_by", self.printed)

    def printed(self, command: tuple[str, ...]) -> str:
        self.reads += 1
        return {THERMAL_LEVEL: LEVEL.format(self.level), POWER_SETTINGS: self.settings}[command]


def test_heat_is_noted_as_it_comes_and_as_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    mac, notes = Mac(monkeypatch), []
    watch = SlowdownWatch(notes.append)
    seen: list[list[str]] = []
    for level in (0, 1, 2, 3, 1, 2, 1, 0, 0):
        mac.level, mac.now = level, mac.now + 61
        watch.look()
        seen.append(list(notes))
        notes.clear()
    assert seen == [[], [], [IS_HOT], [], [], [], [], [IS_COOL], []]
