"""The verbs that steer a run from a terminal: `change` while it trains, and `resume --set`."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.runs.steering import read_changes
from backend.utils.command import backend_command, backend_environment
from tests.support import small_run
from tests.support.verbs import call, refused, run_ok


@pytest.fixture
def training(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunFolder, Any]]:
    """A run that waits in a pause after its first step, in a process of its own."""
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path))
    run = RunFolder(tmp_path / "mine")
    small_run.write_config(run.config, small_run.settings_for(inputs, iters=3000))
    command = backend_command("train", "--run", str(run.path), "--stream")
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=backend_environment())
    assert child.stdout
    for line in child.stdout:
        event = json.loads(line)
        if event["kind"] == "step" and event["step"] == 1:
            run.say("pause")
        if event.get("phase") == "paused":
            break
    yield run, child
    child.kill()
    child.communicate()


def test_change_tells_from_which_step_it_holds(training: tuple[RunFolder, Any]) -> None:
    run, child = training

    def require_finished(step: int) -> None:
        *_, last = read_events(run.events)
        assert (last["kind"], last["step"]) == ("finished", step)

    begun = time.monotonic()
    said = refused("change", "mine", "learning_rate=5e-6", "num_generations=4")
    assert "group_size: Group is fixed once a run has begun" in said
    assert run_ok("change", "mine", "learning_rate=1e-5").stdout.startswith("Nothing was changed: ")
    step = small_run.steps(run)[-1]
    said = run_ok("change", "mine", f"iters={step + 3}", "learning_rate=5e-6").stdout
    (change,) = read_changes(run)
    assert said == f"From step {change.step} on: Iterations 3000 → {step + 3}, Learning Rate 1e-05 → 5e-06.\n"
    assert change.step in (step + 1, step + 2) and time.monotonic() - begun < 5
    run.say("resume")
    assert child.wait(20) == 0
    require_finished(step + 3)
    said = refused("change", "mine", "beta=0.1")
    assert "is not training; “resume mine --set beta=0.1” goes on" in said
    assert "has finished; give it more steps as well" in refused("resume", "mine", "--set", "beta=0.1")
    run_ok("resume", "mine", "--set", f"iters={step + 4}", "--set", "beta=0.1")
    require_finished(step + 4)
    assert [event["step"] for event in read_events(run.events) if event["kind"] == "change"] == [change.step, step + 4]
    assert call("clone", "mine", "--set", "rank=4").exit_code == 2
    run_ok("clone", "mine", "--set", f"iters={step + 5}", "--name", "next", "--start")
    assert small_run.steps(RunFolder(run.path.parent / "next")) == list(range(1, step + 6))
