"""`replay` plays a recorded run: the same events and completions, the recorded times divided by the speed, the same
ending."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend.__main__ import app
from backend.runs import archive
from backend.runs.events import Event, read_events
from backend.runs.replay import replay
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from backend.utils.places import project_root, runs_folder
from tests.support.diaries import recording


def recorded(tmp_path: Path, name: str = "healthy-grpo") -> RunFolder:
    """A recorded run with completions and a log."""
    run = recording(name).unpack(tmp_path / "recorded" / name)
    steps = [event["step"] for event in read_events(run.events) if event["kind"] == "step"]
    rows = [{"step": step, "prompt": f"{step}+{group}=", "completions": []} for step in steps for group in range(2)]
    run.completions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.log.write_text("its last words\n")
    return run


def bare(events: list[Event]) -> list[Event]:
    """Without what differs by design: times, numbers, the mark of a replay."""
    return [
        {key: value for key, value in event.items() if key not in ("t", "mono", "seq", "pid", "command")}
        for event in events
        if not str(event.get("sentence", "")).startswith("A replay of")
    ]


ENDS = {"healthy-grpo": "finished", "lr-1": "failed", "crashed": "crashed", "half-written": "crashed"}
"""Recorded runs, and the state that each was left in."""
PLAY_ALL = """
import sys
from backend.__main__ import app
for source in sys.argv[2:]:
    app()(["replay", source, "--speed", "0", "--runs-dir", sys.argv[1]], standalone_mode=False)
"""


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the replay of each of these runs, and the runs themselves in `recorded`. One process has played all
    of them: it has to be over before any counts as ended."""
    folder = tmp_path_factory.mktemp("replayed")
    sources = [str(recorded(folder, name).path) for name in ENDS]
    program = [sys.executable, "-c", PLAY_ALL, str(folder), *sources]
    subprocess.run(program, check=True, cwd=project_root(), capture_output=True)
    return folder


@pytest.mark.parametrize(("name", "state"), ENDS.items())
def test_a_replay_ends_as_the_run(replayed: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str) -> None:
    monkeypatch.setattr(archive, "STARTUP_GRACE_S", 0.0)
    source, copy = RunFolder(replayed / "recorded" / name), RunFolder(replayed / f"{name}-replay")
    assert archive.summary(copy).state == archive.summary(source).state == state
    assert bare(list(read_events(copy.events))) == bare(list(read_events(source.events)))
    assert copy.completions.read_bytes() == source.completions.read_bytes()
    assert copy.events.read_bytes().rpartition(b"\n")[2] == source.events.read_bytes().rpartition(b"\n")[2]
    assert copy.config.read_bytes() == source.config.read_bytes() and copy.log.read_text().endswith("its last words\n")


def test_a_steered_run_keeps_its_changes(tmp_path: Path) -> None:
    """Without them the replay would show its first settings as the present ones."""
    source = recorded(tmp_path)
    source.changes.write_text('{"v": 1, "changes": [{"step": 3, "settings": {"beta": [0.02, 0.1]}}]}')
    assert replay(source, tmp_path, "steered", 0).folder.changes.read_bytes() == source.changes.read_bytes()


def test_times_are_divided_by_the_speed_and_it_is_marked_as_a_replay(tmp_path: Path) -> None:
    source = recorded(tmp_path)
    events = list(read_events(source.events))[:8]
    for index, event in enumerate(events):
        event["t"] = 1000.0 + 2 * index
    source.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    playing = replay(source, tmp_path, "again", 20)
    playing.play()
    played = list(read_events(playing.folder.events))
    assert 0.7 * 0.9 < played[-1]["t"] - played[0]["t"] < 0.7 + 1.0  # seven gaps of 2 s at 20 times the speed
    assert [event["seq"] for event in played] == list(range(len(played)))
    assert any(event.get("sentence", "").startswith("A replay of the run healthy-grpo") for event in played)


@pytest.mark.parametrize("asks", ["SIGTERM", "the word stop"])
def test_it_holds_the_lock_and_obeys_a_stop(tmp_path: Path, asks: str) -> None:
    source = recorded(tmp_path)
    verb = ["replay", str(source.path), "--speed", "0.001", "--runs-dir", str(tmp_path)]
    program = [sys.executable, "-m", "backend", *verb]
    process = subprocess.Popen(program, cwd=project_root(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = RunFolder(Path(process.stdout.readline().strip()))
    while not folder.has_event_log:
        time.sleep(0.01)
    assert folder.is_locked()
    process.send_signal(signal.SIGTERM) if asks == "SIGTERM" else folder.say("stop")
    assert process.wait(timeout=20) == 3 and not folder.is_locked()
    assert list(read_events(folder.events))[-1]["kind"] == "stopped"


def test_mistakes_are_told_in_a_sentence(tmp_path: Path) -> None:
    source = recorded(tmp_path)
    for arguments, sentence in [
        ((str(source.path), "--speed", "-1"), "The speed is a number above 0, or 0 for at once, not -1."),
        (("nothing-here",), "There is no run nothing-here"),
        ((str(source.path), "--name", "../elsewhere"), "run_name: A run cannot be called ../elsewhere"),
    ]:
        result = CliRunner().invoke(app(), ["replay", *arguments])
        assert result.exit_code == 2 and sentence in result.stderr
    assert not (tmp_path / "elsewhere").exists() and not (runs_folder().parent / "elsewhere").exists()
    source.events.unlink()
    with pytest.raises(UserError, match="has no event log yet"):
        replay(source, tmp_path)
