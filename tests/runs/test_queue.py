"""The queue: an order in a file that survives everything, changed by one process at a time."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from backend.runs import archive
from backend.runs import queue as queues
from backend.runs.events import EventLog, read_events
from backend.runs.queue import QueueFile, train_queue
from backend.runs.run_folder import RunFolder, hold_lock
from backend.utils import places
from backend.utils.command import backend_command, backend_environment
from backend.utils.errors import UserError
from tests.support import small_run


def prepared(name: str, folder: Path | None = None) -> RunFolder:
    """A run folder with settings and no event log, as old as if it had been waiting for an hour."""
    run = RunFolder((folder or places.runs_folder()) / name)
    run.path.mkdir(parents=True)
    run.config.write_text("model: a\ndata: b\n")
    os.utime(run.config, (1e9, 1e9))
    return run


def names(queue: QueueFile) -> list[str]:
    return [run.name for run in queue.read().waiting]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> QueueFile:
    """Three runs wait: a, b, c."""
    monkeypatch.setattr(queues, "POLL_S", 0.01)
    queue = QueueFile()
    for name in "abc":
        queue.add(prepared(name))
    return queue


@pytest.mark.parametrize(("place", "order"), [(0, "bac"), (2, "acb"), (99, "acb"), (-5, "bac")])
def test_a_run_moves_to_a_place(queue: QueueFile, place: int, order: str) -> None:
    queue.move(RunFolder(places.runs_folder() / "b"), place)
    assert names(queue) == list(order)


def test_what_was_deleted_or_has_begun_waits_no_more(queue: QueueFile) -> None:
    first, second, third = queue.read().waiting
    first.config.unlink()
    write_event_log(second)
    lock = hold_lock(third)
    assert names(queue) == []
    os.close(lock)
    assert names(queue) == ["c"], "its process died before the first line of the event log: it waits again"
    queue.add(prepared("d"))
    assert json.loads(queue.path.read_text())["runs"] == ["c", "d"]


def begun(name: str, ending: str = "stopped") -> RunFolder:
    """A run that has trained."""
    run = prepared(name)
    for kind in ("started", "step", ending):
        EventLog(run.events).write(kind)
    return run


def test_a_run_that_has_begun_waits_until_it_goes_on(queue: QueueFile) -> None:
    stopped = begun("stopped")
    assert queue.add(stopped, first=True) == 0
    queue.add(prepared("d"))
    assert names(queue) == ["stopped", "a", "b", "c", "d"]
    assert queue.holds(stopped) and archive.summary(stopped).state == "stopped"
    lock = queue.hold_runner_lock()
    assert queue.start_next(lock) == stopped
    os.close(lock)
    assert names(queue)[0] == "stopped", "its runner died before it went on: it waits again"
    with stopped.events.open("r+") as event_log:  # what the first moment of a resume does
        event_log.truncate(50)
    assert names(queue) == ["a", "b", "c", "d"]
    queue.change(is_paused=True)
    assert json.loads(queue.path.read_text())["diaries"] == {}
    queue.add(stopped)
    assert names(queue)[-1] == "stopped", "stopped once more, it may wait once more"


def test_a_run_that_could_not_go_on_is_dropped(queue: QueueFile) -> None:
    stopped = begun("stopped")
    queue.add(stopped, first=True)
    lock = queue.hold_runner_lock()
    queue.start_next(lock)
    queue.settle(stopped)
    os.close(lock)
    assert names(queue) == ["a", "b", "c"]


def test_what_trains_or_has_finished_may_not_wait(queue: QueueFile, tmp_path: Path) -> None:
    done = begun("done", "finished")
    with pytest.raises(UserError, match="has finished; clone it"):
        queue.add(done)
    lock = hold_lock(held := begun("held"))
    with pytest.raises(UserError, match="is training"):
        queue.add(held)
    os.close(lock)
    with pytest.raises(UserError, match=r"holds no config\.yaml"):
        queue.add(RunFolder(places.runs_folder() / "nothing"))
    with pytest.raises(UserError, match="is not in the folder of runs"):
        queue.add(prepared("elsewhere", tmp_path / "other"))
    with pytest.raises(UserError, match="does not wait"):
        queue.move(done, 0)


WRONG = [{"runs": 3}, {"runs": ["../a"]}, {"starting": 3}]


@pytest.mark.parametrize("text", ["{half", "[]", *(json.dumps({"runs": []} | wrong) for wrong in WRONG)])
def test_a_broken_file_is_told_and_stays_as_it_is(queue: QueueFile, text: str) -> None:
    queue.path.write_text(text)
    for change in (queue.read, lambda: queue.add(prepared("d")), lambda: queue.change(is_paused=True)):
        with pytest.raises(UserError, match=r"queue\.json (is no queue|is not valid JSON).* fix or delete it"):
            change()
    assert queue.path.read_text() == text
    assert archive.summary(RunFolder(places.runs_folder() / "a")).state == "crashed", "the table of runs still shows it"


def test_the_run_that_is_being_started_waits_no_more_until_its_runner_dies(queue: QueueFile) -> None:
    lock = queue.hold_runner_lock()
    run = queue.start_next(lock)
    assert isinstance(run, RunFolder) and run.name == "a"
    assert names(queue) == ["b", "c"]
    with pytest.raises(UserError, match="does not wait"):
        queue.move(run, 1)
    with pytest.raises(UserError, match="another process"):
        queue.hold_runner_lock()
    os.close(lock)
    assert names(queue) == ["a", "b", "c"]
    assert not queue.has_runner()


def test_a_waiting_run_is_queued_and_may_be_removed(queue: QueueFile) -> None:
    run = queue.read().waiting[1]
    assert archive.summary(run).state == "queued"
    queue.remove(run)
    assert names(queue) == ["a", "c"]


def add_many(folder: Path, stem: str) -> None:
    for number in range(10):
        QueueFile(folder).add(prepared(f"{stem}{number}", folder))


def test_two_processes_lose_none_of_each_others_changes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=add_many, args=(tmp_path, stem)) for stem in "xy"]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert sorted(names(QueueFile(tmp_path))) == sorted(f"{stem}{number}" for stem in "xy" for number in range(10))


def test_a_run_that_trains_or_was_just_launched_is_found(queue: QueueFile) -> None:
    assert queues.training_run() is None, "waiting is no training"
    launched = prepared("launched")
    launched.log.touch()
    assert queues.training_run() == launched
    os.utime(launched.log, (1e9, 1e9))
    assert queues.training_run() is None
    lock = hold_lock(launched)
    assert queues.training_run() == launched
    os.close(lock)


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
    assert train_queue(queue, said.append, trainings) == "empty"
    assert trainings.order == ["a", "b", "c"]
    assert said[:2] == ["a begins.", "a has finished."]
    assert not queue.has_runner() and queue.read().waiting == ()


@pytest.mark.parametrize("code", [1, 2, -signal.SIGKILL], ids=["bug", "mistake", "killed"])
def test_the_queue_goes_on_after_a_failure(queue: QueueFile, code: int) -> None:
    trainings, said = Trainings({"a": code}), list[str]()
    train_queue(queue, said.append, trainings)
    assert trainings.order == ["a", "b", "c"]
    assert any("runs out of memory" in sentence for sentence in said) == (code < 0)


def test_a_failure_pauses_the_queue_where_that_is_wanted_and_a_stop_does_not(queue: QueueFile) -> None:
    queue.change(pauses_after_failure=True)
    trainings = Trainings({"a": 3, "b": 2})
    assert train_queue(queue, lambda _: None, trainings) == "paused"
    assert trainings.order == ["a", "b"]
    assert queue.read().is_paused and [run.name for run in queue.read().waiting] == ["c"]
    queue.change(is_paused=False)
    assert train_queue(queue, lambda _: None, trainings) == "empty"
    assert trainings.order == ["a", "b", "c"]


def test_what_is_added_and_moved_while_a_run_trains_counts(queue: QueueFile) -> None:
    trainings = Trainings()

    def train(run: RunFolder) -> int:
        if run.name == "a":
            queue.move(RunFolder(places.runs_folder() / "c"), 0)
        return trainings(run)

    train_queue(queue, lambda _: None, train)
    assert trainings.order == ["a", "c", "b"]


def test_a_run_of_another_process_is_waited_for(queue: QueueFile) -> None:
    other = RunFolder(places.runs_folder() / "other")
    other.path.mkdir()
    other.config.write_text("model: a\n")
    lock, trainings, waits = hold_lock(other), Trainings(), threading.Event()

    def say(sentence: str) -> None:
        if sentence == "Waits for other, which is training.":
            waits.set()

    runner = threading.Thread(target=train_queue, args=(queue, say, trainings))
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
