"""Runs that are killed at any moment and resumed equal runs that were not: every file of them, bit by bit. In the suite
trainer/test_trainer.py kills one."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.utils.command import backend_command, backend_environment
from tests.support import small_run

OF_TIME = ("time/", "process/", "machine/", "peak_memory")


def begin(verb: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = backend_command(verb, *arguments)
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=backend_environment(), start_new_session=True, **output)


def content(run: RunFolder) -> dict[str, Any]:
    """What a run leaves, without times."""
    steps = [
        {key: value for key, value in event["metrics"].items() if not (key.startswith(OF_TIME) or "per_second" in key)}
        for event in read_events(run.events)
        if event["kind"] == "step"
    ]
    files = {
        str(path.relative_to(run.path)): path.read_bytes()
        for path in sorted(run.path.rglob("*"))
        if path.is_file() and (path.suffix == ".safetensors" or path.name == "completions.jsonl")
    }
    return {"steps": steps, **files}


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(30))
def test_a_killed_run_equals_one_that_was_not(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    runs = [RunFolder(tmp_path / "runs" / name) for name in ("whole", "killed")]
    for run in runs:
        raw = small_run.settings_for(tmp_path / "inputs", iters=6, save_every=2, **small_run.low_half(tmp_path))
        small_run.prepare(run, raw)
    whole, killed = runs
    assert begin("train", "--run", str(whole.path)).wait(120) == 0
    process = begin("train", "--run", str(killed.path))
    for _ in range(3 if seed else 1):
        wanted = dice.randrange(1, 6)
        while process.poll() is None and len(small_run.steps(killed)) < wanted:
            time.sleep(0.01)
        time.sleep(dice.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = begin("resume", str(killed.path))
    assert process.wait(120) == 0, killed.log.read_text()
    assert content(killed) == content(whole)
