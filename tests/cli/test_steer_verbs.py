"""The verbs that steer from a terminal: `change` while a run trains, `resume --set`, and `queue …`."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.cli import runs
from backend.runs.events import read_events
from backend.runs.queue_runner import QueueRunner
from backend.runs.run_folder import RunFolder, all_runs
from backend.runs.steering import read_changes
from backend.utils import places
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
    run.say("resume")
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
    rates = [f"{number}e-06" for number in range(1, 7)]
    threads = [threading.Thread(target=runs.change, args=("mine", [f"learning_rate={x}"]), name=x) for x in rates]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert len(said) == 6 and all(text.endswith(f" → {rate}.") for rate, text in said)


def typed(*arguments: object, code: int = 0) -> str:
    done = call(*arguments)
    assert done.exit_code == code, done.output
    return done.output


def waiting() -> list[str]:
    return json.loads(typed("queue", "list", "--json"))["waiting"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return small_run.write_config(tmp_path / "quick.yaml", small_run.settings_for(tmp_path))


def test_a_queue_is_filled_ordered_paused_and_emptied(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1 run waits. `queue run` trains them." in typed("queue", "add", config, "--name", "one")
    typed("queue", "add", config, "--name", "two", "--set", "seed=5")
    typed("queue", "add", config, "--name", "three", "--first")
    assert waiting() == ["three", "one", "two"]
    assert "seed: 5" in (places.runs_folder() / "two" / "config.yaml").read_text()
    assert typed("queue", "move", "two", 1).splitlines()[0] == "1  two"
    assert "deleted" in typed("queue", "remove", "three")
    assert waiting() == ["two", "one"] and not (places.runs_folder() / "three").exists()
    assert "paused" in typed("queue", "pause")
    assert "The queue is paused" in typed("queue", "run", code=2)
    assert "A failure pauses it." in typed("queue", "pause", "--after-failure")
    typed("queue", "pause", "--not-after-failure")
    typed("queue", "resume")
    trained: list[str] = []

    def train(run: RunFolder) -> int:
        trained.append(run.name)
        run.events.write_text('{"v": 1, "seq": 0, "t": 1.0, "kind": "started"}\n')
        return 0

    monkeypatch.setattr(QueueRunner, "_note_end", lambda *_: None)
    monkeypatch.setattr(QueueRunner.__init__, "__defaults__", (train,))
    assert "No run waits." in typed("queue", "run")
    assert trained == ["two", "one"]


def test_mistakes_leave_nothing_behind(config: Path) -> None:
    assert "There is no file" in typed("queue", "add", config.with_name("no.yaml"), code=2)
    assert "There is no run nobody" in typed("queue", "move", "nobody", 1, code=2)
    assert not list(all_runs())
    typed("queue", "add", config, "--name", "one")
    (places.runs_folder() / "queue.json").write_text("{")
    assert "queue.json is not valid JSON" in typed("queue", "add", config, "--name", "two", code=2)
    assert [run.name for run in all_runs()] == ["one"]


def test_a_prepared_folder_waits_and_keeps_what_it_holds_when_it_is_removed(tmp_path: Path) -> None:
    run = RunFolder(places.runs_folder() / "cloned")
    small_run.write_config(run.config, small_run.settings_for(tmp_path))
    run.parent.write_text("{}")
    typed("queue", "add", run.path)
    assert waiting() == ["cloned"]
    assert "as it holds parent.json" in typed("queue", "remove", "cloned")
    assert run.parent.exists() and waiting() == []
