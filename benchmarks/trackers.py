"""What a tracker costs its run: the demo with one and without, in pairs, each run a fresh process.

A tracker is a process of its own, so what it may cost the run is the time that both compete for: cores, disk, memory.
The processor time is that of the trainer and its reward functions alone, as the kernel counts it; the seconds are those
of a clock.
"""

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from backend.bench.report import TextTable
from backend.config.config import read
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.trackers.targets import TRACKERS
from backend.utils import file_lock
from backend.utils.command import backend_command, backend_environment
from backend.utils.places import demo_config

NOTHING = "none"
MOST_WAIT_S = 300.0  # how long a tracker may go on after its run; the next run begins once it has ended


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run, in seconds: from the first process to the last line, of all steps by the trainer's own clock, of
    processor time."""

    wall: float
    steps: float
    processor: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A run with a tracker and one without, one after the other."""

    tracker: str
    tracked: Cost
    plain: Cost

    def ratio(self, kind: str) -> float:
        return getattr(self.tracked, kind) / getattr(self.plain, kind)


def measure(names: Sequence[str], pairs: int, steps: int, note: Callable[[str], None]) -> list[Pair]:
    """`pairs` pairs for each tracker, in turns, so that what else the machine does falls on all alike."""
    found: list[Pair] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(pairs):
            for name in names:
                order = (NOTHING, name) if number % 2 else (name, NOTHING)
                costs = {each: _run(Path(folder), f"{name}-{number}-{each}", each, steps) for each in order}
                found.append(Pair(name, costs[name], costs[NOTHING]))
                note(f"{name}, pair {number + 1} of {pairs}: {found[-1].ratio('wall'):.3f} of the time without")
    return found


def table(pairs: Sequence[Pair]) -> TextTable:
    """The ratio with to without a tracker: medians over the pairs, and the range."""
    rows: list[Sequence[str]] = []
    for name in dict.fromkeys(pair.tracker for pair in pairs):
        own = [pair for pair in pairs if pair.tracker == name]
        ratios = {kind: [pair.ratio(kind) for pair in own] for kind in ("wall", "steps", "processor")}
        rows.append([name, *(_spread(each) for each in ratios.values()), str(len(own))])
    header = ("tracker", "whole run", "its steps", "processor time of the trainer", "pairs")
    return TextTable("A run with a tracker, as a multiple of the same run without", header, rows)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _run(folder: Path, name: str, tracker: str, steps: int) -> Cost:
    """Train the demo. Raises RuntimeError where that fails."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(read(demo_config()) | {"iters": steps, "fuse": False, "report_to": [tracker]}))
    command = backend_command("train", str(config), "--runs-dir", str(folder / "runs"), "--name", name)
    own = {"GRPO_STUDIO_PREFS": str(folder / "prefs"), "TRACKIO_DIR": str(folder / "trackio")}
    began = time.perf_counter()
    with (folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(command, env=backend_environment(dict(os.environ) | own), stdout=out, stderr=out)
        _, status, used = os.wait4(process.pid, 0)  # of the trainer and of what it has waited for: no tracker is
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{name} ended with {process.returncode}:\n{(folder / f'{name}.out').read_text()[-2000:]}")
    run = RunFolder(folder / "runs" / name)
    _wait_for(run, tracker)
    seconds = [event["metrics"]["time/step"] for event in read_events(run.events) if event["kind"] == "step"]
    return Cost(wall, sum(seconds), used.ru_utime + used.ru_stime)


def _wait_for(run: RunFolder, tracker: str) -> None:
    """Wait until the run's tracker has ended, so that it does not run beside the next. Raises RuntimeError where it
    does not."""
    until = time.monotonic() + MOST_WAIT_S
    while tracker in TRACKERS and file_lock.is_held(run.trackers / f"{tracker}.lock"):
        if time.monotonic() > until:
            raise RuntimeError(f"{tracker} has not ended {MOST_WAIT_S:.0f} s after {run.name}.")
        time.sleep(0.1)
