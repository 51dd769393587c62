"""A run that the GPU fails goes on in a fresh program with the same pid, and nobody who watches it sees it end."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.state.run_state import RunState
from backend.runs.events import Follower, read_events
from backend.runs.run_folder import LOCK_VARIABLE, RunFolder, hand_on_lock, hold_lock, inherited_lock
from backend.trainer.machine import gpu_error
from backend.utils.command import backend_command, backend_environment
from tests.support import failing_gpu, small_run
from tests.support.failing_gpu import INTERACTIVITY


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A prepared folder, as the window makes it."""
    folder = RunFolder(tmp_path / "runs" / "mine")
    # A reward that varies: without any signal a step has no micro-batch.
    raw = small_run.settings_for(tmp_path, iters=4, batch_size=2, save_every=2, **small_run.low_half(tmp_path))
    small_run.prepare(folder, raw)
    return folder


def states(run: RunFolder, child: subprocess.Popen[bytes]) -> Iterator[str]:
    """What a window shows of the run, every few milliseconds until the child has ended."""
    follower, state = Follower(run.events), RunState()
    while child.poll() is None:
        is_locked = run.is_locked()
        for event in follower.read():
            if follower.restarted:
                state = RunState()
            state.apply(event)
        yield state.state(is_locked=is_locked, may_be_coming=state.is_empty)
        time.sleep(0.01)


@pytest.mark.proof
def test_a_run_that_the_gpu_fails_goes_on_to_its_end_and_a_window_sees_it_live_throughout(run: RunFolder) -> None:
    failures: failing_gpu.Failures = [["learning", 4, INTERACTIVITY]]
    environment = failing_gpu.environment(backend_environment(), run.path.parent / "failures.json", failures)
    with run.log.open("ab") as log:
        command = backend_command("train", "--run", str(run.path))
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    seen = list(states(run, child))
    assert child.wait(120) == 0, run.log.read_text()
    live = seen[: seen.index("finished")] if "finished" in seen else seen
    assert set(live) == {"starting", "running"} and set(seen[len(live) :]) <= {"finished"}
    event_log = list(read_events(run.events))
    assert [event["seq"] for event in event_log] == list(range(len(event_log)))
    assert small_run.steps(run) == [1, 2, 3, 4] and event_log[-1]["kind"] == "finished"
    starts = [event for event in event_log if event["kind"] == "started"]
    assert {event["pid"] for event in starts} == {child.pid}
    assert [event["resumed_from"] for event in starts] == [None, 3] and "resume" in starts[-1]["command"]
    (told,) = [event["sentence"] for event in event_log if event["kind"] == "note" and event["level"] == "warning"]
    error = gpu_error(RuntimeError(INTERACTIVITY))
    assert error is not None and told.startswith(error.happened) and told.endswith(error.advice)
    lines = [json.loads(line)["step"] for line in run.completions.read_text().splitlines()]
    assert lines == [1, 1, 2, 2, 3, 3, 4, 4]
    assert run.log.read_text().count("[METAL]") == 1, "Metal's own words are in the log"


def test_a_lock_that_is_handed_on_is_never_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    for folder in (run, other):
        folder.path.mkdir()
        folder.lock.touch()
    monkeypatch.delenv(LOCK_VARIABLE, raising=False)
    handle = hold_lock(run)
    hand_on_lock(handle)
    assert os.get_inheritable(handle) and inherited_lock(other) is None, "the variable may be from another process"
    assert inherited_lock(run) == handle and run.is_locked()
    assert not os.get_inheritable(handle), "no child may hold it"
    assert inherited_lock(run) is None, "once"
    os.close(handle)
    assert not run.is_locked()
