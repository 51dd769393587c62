"""The verbs that steer from a terminal: `change` while a run trains, `resume --set`, and `queue …`."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.state.run import RunState
from backend.cli import runs
from backend.runs.events import Follower, read_events
from backend.runs.queue import train_queue
from backend.runs.run_folder import LOCK_VARIABLE, RunFolder, all_runs, hand_on_lock, hold_lock, inherited_lock
from backend.runs.steering import read_changes
from backend.trainer.machine import gpu_error
from backend.utils import places
from backend.utils.command import backend_command, backend_environment
from tests.support import failing_gpu, small_run
from tests.support.failing_gpu import INTERACTIVITY
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


def test_change_tells_from_which_step_it_holds(
    training: tuple[RunFolder, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with monkeypatch.context() as patch:
        each_of_several_changes_at_once_gets_its_own_answer(patch)
    assert len(read_changes(run)) == 7
    assert run_ok("resume", "mine").stdout == "The run mine goes on.\n"
    assert child.wait(20) == 0
    require_finished(step + 3)
    said = refused("change", "mine", "beta=0.1")
    assert "is not training; “resume mine --set beta=0.1 --set iters=N” goes on" in said
    assert "has finished; give it more steps as well" in refused("resume", "mine", "--set", "beta=0.1")
    run_ok("resume", "mine", "--set", f"iters={step + 4}", "--set", "beta=0.1")
    require_finished(step + 4)
    changes = [event["step"] for event in read_events(run.events) if event["kind"] == "change"]
    assert changes[0] == change.step and changes[-1] == step + 4
    assert call("clone", "mine", "--set", "rank=4").exit_code == 2
    run_ok("clone", "mine", "--set", f"iters={step + 5}", "--name", "next", "--start")
    assert small_run.steps(RunFolder(run.path.parent / "next")) == list(range(1, step + 6))


def each_of_several_changes_at_once_gets_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(runs, "tell", lambda text: said.append((threading.current_thread().name, text)))
    rates = [f"{number}e-07" for number in range(1, 7)]  # none is the rate of now
    threads = [threading.Thread(target=runs.change, args=("mine", [f"learning_rate={x}"]), name=x) for x in rates]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert len(said) == 6 and all(text.endswith(f" → {rate}.") for rate, text in said)


def waiting() -> list[str]:
    return json.loads(run_ok("queue", "list", "--json").stdout)["waiting"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return small_run.write_config(tmp_path / "quick.yaml", small_run.settings_for(tmp_path))


def test_a_queue_is_filled_ordered_paused_and_emptied(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1 run waits. `queue run` trains them." in run_ok("queue", "add", config, "--name", "one").stdout
    run_ok("queue", "add", config, "--name", "two", "--set", "seed=5")
    run_ok("queue", "add", config, "--name", "three", "--first")
    assert waiting() == ["three", "one", "two"]
    assert "seed: 5" in (places.runs_folder() / "two" / "config.yaml").read_text()
    assert run_ok("queue", "move", "two", 1).stdout.splitlines()[0] == "1  two"
    assert "deleted" in run_ok("queue", "remove", "three").stdout
    assert waiting() == ["two", "one"] and not (places.runs_folder() / "three").exists()
    assert "paused" in run_ok("queue", "pause").stdout
    assert "The queue is paused" in refused("queue", "run")
    assert "A failure pauses it." in run_ok("queue", "pause", "--after-failure").stdout
    run_ok("queue", "pause", "--not-after-failure")
    run_ok("queue", "resume")
    trained: list[str] = []

    def train(run: RunFolder) -> int:
        trained.append(run.name)
        run.events.write_text('{"v": 1, "seq": 0, "t": 1.0, "kind": "started"}\n')
        return 0

    monkeypatch.setattr(train_queue, "__defaults__", (train,))
    assert "No run waits." in run_ok("queue", "run").stdout
    assert trained == ["two", "one"]


def test_mistakes_leave_nothing_behind(config: Path) -> None:
    assert "There is no file" in refused("queue", "add", config.with_name("no.yaml"))
    assert "There is no run nobody" in refused("queue", "move", "nobody", 1)
    assert not list(all_runs())
    run_ok("queue", "add", config, "--name", "one")
    (places.runs_folder() / "queue.json").write_text("{")
    assert "queue.json is not valid JSON" in refused("queue", "add", config, "--name", "two")
    assert [run.name for run in all_runs()] == ["one"]


def test_a_prepared_folder_waits_and_keeps_what_it_holds_when_it_is_removed(tmp_path: Path) -> None:
    run = RunFolder(places.runs_folder() / "cloned")
    small_run.write_config(run.config, small_run.settings_for(tmp_path))
    run.parent.write_text("{}")
    run_ok("queue", "add", run.path)
    assert waiting() == ["cloned"]
    assert "as it holds parent.json" in run_ok("queue", "remove", "cloned").stdout
    assert run.parent.exists() and waiting() == []


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
        yield state.state(is_locked=is_locked, may_be_coming=state.last_t is None)
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
