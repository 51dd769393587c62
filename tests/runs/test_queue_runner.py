"""The runner of the queue: one run after the other, whatever happens to a run, to a window or to the runner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from backend.runs import queue_runner
from backend.runs.events import read_events
from backend.runs.queue import QueueFile
from backend.runs.queue_runner import QueueRunner
from backend.runs.run_folder import RunFolder, hold_lock
from backend.utils import places
from backend.utils.command import backend_command, backend_environment
from tests.runs.test_queue import prepared
from tests.support import small_run


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> QueueFile:
    """Runs a, b and c wait."""
    monkeypatch.setattr(queue_runner, "POLL_S", 0.01)
    queue = QueueFile()
    for name in "abc":
        queue.add(prepared(name))
    return queue


def write_event_log(run: RunFolder) -> None:
    run.events.write_text('{"v": 1, "seq": 0, "t": 1.0, "kind": "started"}\n')


class Trainings:
    """Stands in for `train --run`: notes the order, and ends each run with its code."""

    def __init__(self, codes: dict[str, int] | None = None) -> None:
        self.codes = codes or {}
        self.order: list[str] = []

    def __call__(self, run: RunFolder) -> int:
        self.order.append(run.name)
        code = self.codes.get(run.name, 0)
        if code != 1:  # 1: it dies before its first line
            write_event_log(run)
        return code


def test_every_run_trains_once_in_its_turn(queue: QueueFile) -> None:
    trainings, said = Trainings(), []
    assert QueueRunner(queue, said.append, trainings).run() == "empty"
    assert trainings.order == ["a", "b", "c"]
    assert said[:2] == ["a begins.", "a has finished."]
    assert not queue.has_runner() and queue.read().waiting == ()


@pytest.mark.parametrize("code", [1, 2, -signal.SIGKILL], ids=["bug", "mistake", "killed"])
def test_the_queue_goes_on_after_a_failure(queue: QueueFile, code: int) -> None:
    trainings, said = Trainings({"a": code}), list[str]()
    QueueRunner(queue, said.append, trainings).run()
    assert trainings.order == ["a", "b", "c"]
    assert any("runs out of memory" in sentence for sentence in said) == (code < 0)


def test_a_failure_pauses_the_queue_where_that_is_wanted_and_a_stop_does_not(queue: QueueFile) -> None:
    queue.set_pauses_after_failure(True)
    trainings = Trainings({"a": 3, "b": 2})
    assert QueueRunner(queue, lambda _: None, trainings).run() == "paused"
    assert trainings.order == ["a", "b"]
    assert queue.read().is_paused and [run.name for run in queue.read().waiting] == ["c"]
    queue.set_paused(False)
    assert QueueRunner(queue, lambda _: None, trainings).run() == "empty"
    assert trainings.order == ["a", "b", "c"]


def test_what_is_added_and_moved_while_a_run_trains_counts(queue: QueueFile) -> None:
    trainings = Trainings()

    def train(run: RunFolder) -> int:
        if run.name == "a":
            queue.move(RunFolder(places.runs_folder() / "c"), 0)
        return trainings(run)

    QueueRunner(queue, lambda _: None, train).run()
    assert trainings.order == ["a", "c", "b"]


def test_a_run_of_another_process_is_waited_for(queue: QueueFile) -> None:
    other = RunFolder(places.runs_folder() / "other")
    other.path.mkdir()
    other.config.write_text("model: a\n")
    lock, trainings, waits = hold_lock(other), Trainings(), threading.Event()

    def say(sentence: str) -> None:
        if sentence == "Waits for other, which is training.":
            waits.set()

    runner = threading.Thread(target=QueueRunner(queue, say, trainings).run)
    runner.start()
    assert waits.wait(5)
    assert trainings.order == []
    write_event_log(other)
    os.close(lock)
    runner.join(5)
    assert trainings.order == ["a", "b", "c"]


@pytest.mark.proof
def test_kill_9_of_the_runner_loses_nothing(tmp_path: Path) -> None:
    """Real processes: the runner dies while the first run trains; another takes over; every run has every step once."""
    queue = QueueFile()
    for name in ("first", "second", "third"):
        run = RunFolder(places.runs_folder() / name)
        small_run.write_config(run.config, small_run.settings_for(tmp_path, iters=60 if name == "first" else 3))
        queue.add(run)
    first = queue.read().waiting[0]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(backend_command("queue", "run"), env=backend_environment(), stdout=sys.stderr)

    runner = start()
    while not any(event["kind"] == "step" for event in read_events(first.events)):
        time.sleep(0.05)
        assert runner.poll() is None
    runner.kill()
    runner.wait()
    assert first.is_locked(), "the training goes on without its runner"
    assert [run.name for run in queue.read().waiting] == ["second", "third"]
    assert start().wait(120) == 0
    for name, steps in (("first", 60), ("second", 3), ("third", 3)):
        assert small_run.steps(RunFolder(places.runs_folder() / name)) == list(range(1, steps + 1)), name
    logs = [places.runs_folder() / name / "events.jsonl" for name in ("first", "second", "third")]
    begun = [next(read_events(log))["t"] for log in logs]
    assert begun == sorted(begun)
    assert json.loads(queue.path.read_text())["runs"] == []
