"""`queue …` as one types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.runs.queue_runner import QueueRunner
from backend.runs.run_folder import RunFolder, all_runs
from backend.utils import places
from tests.support import small_run
from tests.support.verbs import call


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
