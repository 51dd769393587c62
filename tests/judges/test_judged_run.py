"""Whole runs whose reward is a judge's."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from tests.support import small_run
from tests.support.judge_server import JudgeServer, judge_server


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as server:
        server.score = lambda text: (len(text) % 7) / 6
        yield server


def settings(folder: Path, server: JudgeServer, **arguments: Any) -> dict[str, Any]:
    given = "".join(f', {name}="{value}"' for name, value in arguments.items())
    judge = f'judge(rubric="Be nice.", url="{server.url}"{given}, name=nice)'
    return small_run.settings_for(folder, reward_functions=[judge, "r1_int"], reward_weights=[1.0, 0.1], iters=4)


def test_a_killed_run_asks_nothing_twice(server: JudgeServer, tmp_path: Path, run: RunFolder) -> None:
    raw = settings(tmp_path, server) | {"save_every": 2}
    assert small_run.train_here(raw, run).kind == "finished"
    assert small_run.events(run, "step")[0]["metrics"]["judge/nice/failed"] == 0.0
    resumed, calls = RunFolder(tmp_path / "resumed"), len(server.calls)
    shutil.copytree(run.path, resumed.path)
    shutil.rmtree(resumed.checkpoints / "000004")
    assert small_run.train_here(raw, resumed).kind == "finished"
    assert len(server.calls) == calls
    small_run.assert_same_run(run, resumed)


def test_a_run_pauses_while_its_server_is_gone(server: JudgeServer, tmp_path: Path, run: RunFolder) -> None:
    def come_back() -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            last = [event for event in read_events(run.events) if event["kind"] == "phase"][-1:]
            if last and last[0]["phase"] == "paused":
                server.start()
                run.say("resume")
                return
            time.sleep(0.02)

    def echo(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 2:
            server.stop()
            threading.Thread(target=come_back).start()

    assert small_run.train_here(settings(tmp_path, server), run, echo).kind == "finished"
    (note,) = [note for note in small_run.notes(run) if "does not answer" in note]
    assert note.startswith("The judge nice cannot score") and "resume it" in note
    assert [event["metrics"]["judge/nice/failed"] for event in small_run.events(run, "step")] == [0.0] * 4


def test_a_run_goes_on_without_its_server(server: JudgeServer, tmp_path: Path, run: RunFolder) -> None:
    def echo(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 2:
            server.stop()

    raw = settings(tmp_path, server, when_unreachable="skip")
    assert small_run.train_here(raw, run, echo).kind == "finished"
    (note,) = [note for note in small_run.notes(run) if "does not answer" in note]
    assert "gave no score for some completions" in note
    assert [event["metrics"]["judge/nice/failed"] for event in small_run.events(run, "step")] == [0.0, 0.0, 1.0, 1.0]
