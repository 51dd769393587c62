"""What a list of runs knows: notes, records, the search, disk use, and comparisons."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend.__main__ import app
from backend.config.config import dump, parse
from backend.runs import archive, run_folder, run_record
from backend.runs.archive import summary
from backend.runs.events import Event, EventLog, read_events
from backend.runs.replay import Replay
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.run_search import all_keys, search
from backend.utils.errors import UserError
from backend.utils.places import project_root, runs_folder
from tests.support import made_up_runs
from tests.support.diaries import recording
from tests.support.trainer_by_hand import add_checkpoints


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_up_runs.make_run(tmp_path / "addition", learning_rate=3e-5, grpo_loss_type="dapo")


def test_a_title_cannot_turn_the_row_around(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run_record.change_notes(run, title="good\u202egnp.exe\x07", tags=("a\u2066",), note="one\ntwo")
    notes = run_record.read_notes(run)
    assert (notes.title, notes.tags, notes.note) == ("good\\u202egnp.exe\\x07", ("a\\u2066",), "one\ntwo")


def test_notes_are_kept_field_by_field_and_unknown_fields_with_them(run: RunFolder) -> None:
    assert run_record.read_notes(run) == run_record.RunNotes()
    run_record.change_notes(run, title="Sums", tags=("math", "first"))
    run.about.write_text(json.dumps({**json.loads(run.about.read_text()), "mood": "good"}))
    assert run_record.change_notes(run, favourite=True) == run_record.RunNotes("Sums", "", ("math", "first"), True)
    assert json.loads(run.about.read_text())["mood"] == "good", "a later version's field survives"
    assert list(run.path.glob(".about*")) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"tags": "math"}', '{"title": 3}', '{"favourite": 1}'])
def test_broken_notes_are_told_and_never_overwritten(run: RunFolder, text: str) -> None:
    run.about.write_text(text)
    with pytest.raises(UserError) as raised:
        run_record.change_notes(run, title="Mine")
    assert raised.value.faults[0].setting == "about" and "about.json" in str(raised.value)
    assert run.about.read_text() == text
    record = run_record.read_record(run)
    assert record.notes == run_record.RunNotes() and "about.json" in record.notes_problem


def test_a_record_has_what_the_run_has_and_survives_its_cache(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.config.write_text(dump(parse(archive.raw_settings(run))))
    monkeypatch.setattr(archive, "parse_yaml", pytest.fail)  # as long as it takes for a thousand runs
    run_record.change_notes(run, tags=("math",))
    run_record.write_parent(run, run_record.Parent("base-run", run.path.with_name("base-run"), 4, True, {}))
    record = run_record.read_record(run)
    assert record.setting("learning_rate") == 3e-5 and record.setting("seed") == 0
    assert record.settings["grpo_loss_type"] == "dapo" and "seed" not in record.settings
    assert record.held_out["reward"] == pytest.approx(1.3 + 1.8) and record.parent == "base-run"
    assert record.disk["completions.jsonl"] == run.completions.stat().st_size
    assert record.curve[0] < record.curve[-1] and len(record.curve) <= 40
    assert run_record.record_of(json.loads(json.dumps(asdict(record)))) == record
    assert record.to_dict()["tags"] == ("math",) and record.to_dict()["name"] == "addition"


def test_the_curve_of_a_long_event_log_is_read_in_windows(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path / "events.jsonl")
    for step in range(1, 8001):
        event_log.write("step", step=step, metrics={"reward": step / 1000, "text": "x" * 60})
    event_log.close()
    curve = run_record.reward_curve(event_log.path)
    assert len(curve) == 40 and list(curve) == sorted(curve)
    assert curve[0] < 0.1 and 7.7 < curve[-1] <= 8
    assert run_record.reward_curve(tmp_path / "none.jsonl") == ()


def test_the_newest_evaluation_is_found_far_from_the_end_and_never_that_of_the_test_split(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path / "events.jsonl")
    assert run_record.newest_evaluation(event_log.path) is None, "of an empty file"
    event_log.write("eval", step=1, metrics={"reward": 1.0})
    event_log.write("eval", step=2, metrics={"reward": 2.0})
    for step in range(3, 3000):
        event_log.write("step", step=step, metrics={"reward": 0.0})
    event_log.write("eval", step=3000, split="test", metrics={"reward": 9.0})
    event_log.close()
    assert (run_record.newest_evaluation(event_log.path) or {})["step"] == 2
    assert run_record.evaluations(RunFolder(tmp_path)) == [(1, 1.0), (2, 2.0)]


def passes(query: str, record: run_record.RunRecord) -> bool:
    return search(query, all_keys([record]))(record)


@pytest.fixture
def record(run: RunFolder) -> run_record.RunRecord:
    run_record.change_notes(run, title="Sums of two", tags=("math", "first"), note="rewards rise early", favourite=True)
    return run_record.read_record(run)


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        *(("sums", "products"), ("ADDITION", '"sums two"'), ('"of two"', "-sums"), ("lr>1e-5", "lr>1e-4")),
        *(("lr<=3e-5 tag:math", "lr<=3e-5 tag:physics"), ("loss:dapo", "loss:grpo"), ("loss<1", "loss>1")),
        *(("tag=math", "tag=mat"), ("is:favourite", "is:archived"), ("-is:live", "is:cloned")),
        *(("state:fin", "state:failed"), ("reward>1", "reward<1"), ("kl>0.01", "kl>0.9"), ("hours<1", "hours>1")),
        *(("held_out/accuracy>0.5", "held_out/accuracy>0.9"), ("rewards:accuracy", "rewards:jaccard")),
        *(("num_generations:8", "num_generations:4"), ("title:addition", "title:subtraction")),
    ],
)
def test_a_query(record: run_record.RunRecord, yes: str, no: str) -> None:
    assert passes(yes, record) and not passes(no, record)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("lr>fast", "lr> needs a number, not fast."),
        ("lr>", "lr> needs a value after it."),
        ("temprature:1", "Runs have no temprature. Did you mean temperature?"),
        ("is:nice", "is:nice is not known; there are is:favourite, is:archived, is:live, is:cloned."),
    ],
)
def test_a_query_that_is_none_says_why(record: run_record.RunRecord, query: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        passes(query, record)
    assert raised.value.faults[0].sentence == sentence


def test_all_checkpoints_but_the_best_and_the_newest_are_freed(run: RunFolder) -> None:
    add_checkpoints(run, {10: 1.0, 20: 3.0, 30: 2.0, 40: 2.5}, 1000)
    for file in (run.about, run.parent, run.changes, run.change_request, run.launch_lock, run.completions):
        file.write_text(file.name)
    others = {path for path in run.path.rglob("*") if run.checkpoints not in path.parents}
    (run.checkpoints / ".000005.deleted").mkdir()
    (run.checkpoints / ".000005.deleted" / "model.safetensors").write_bytes(b"0" * 50)
    (space,) = run_record.freeable_space([run])
    assert [saved.step for saved in space.checkpoints] == [10, 30]
    before = sum(run_record.disk_use(run).values())
    assert run_record.free_space(run) == space.bytes + 50 == before - sum(run_record.disk_use(run).values())
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["000020", "000040"]
    assert run_record.freeable_space([run]) == []
    assert others <= set(run.path.rglob("*")), "nothing but checkpoints goes"


def test_nothing_of_a_live_run_is_freed(run: RunFolder) -> None:
    add_checkpoints(run, dict.fromkeys((10, 20, 30), 0.0))
    handle = hold_lock(run)
    assert run_record.freeable_space([run]) == []
    with pytest.raises(UserError, match="being trained"):
        run_record.free_space(run)
    os.close(handle)
    assert len([*run.checkpoints.iterdir()]) == 3
    assert len(run_record.freeable_space([run])) == 1


def test_two_runs_are_compared_by_what_differs(run: RunFolder, tmp_path: Path) -> None:
    changed = {"learning_rate": 1e-4, "seed": 0, "reward_weights": [1, 2, 1, 1, 1]}
    other = made_up_runs.make_run(tmp_path / "other", steps=20, **changed)
    settings, (first, second) = run_record.compare([run, other])
    assert settings == {
        "learning_rate": [3e-5, 1e-4],
        "grpo_loss_type": ["dapo", "grpo"],
        "reward_weights": [[], [1, 2, 1, 1, 1]],
    }, "in the order of the form; a default written out is no difference"
    assert (first["steps"], second["steps"]) == (60, 20) and first["best_step"] == 60
    assert first["held_out_first"] == pytest.approx(1.3 + 1.8 / 60) and first["held_out_best"] == pytest.approx(3.1)
    assert first["reward_last"] == summary(run).reward_after
    table = run_record.settings_table(["a", "b|c"], settings)
    assert run_record.as_csv(table).splitlines()[1] == "Learning Rate,3e-05,0.0001"
    assert run_record.as_markdown(table).splitlines()[:2] == ["| Setting | a | b\\|c |", "|---|---|---|"]


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
app()(["replay", "healthy-grpo-replay", "--speed", "0", "--runs-dir", sys.argv[1]], standalone_mode=False)
"""


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the replay of each of these runs, and the runs themselves in `recorded`. One process has played all
    of them: it has to be over before any counts as ended."""
    folder = tmp_path_factory.mktemp("replayed")
    sources = [str(recorded(folder, name).path) for name in ENDS]
    program = [sys.executable, "-c", PLAY_ALL, str(folder), *sources]
    subprocess.run(program, check=True, cwd=project_root(), capture_output=True)
    assert (folder / "healthy-grpo-replay-replay").is_dir(), "a name is one of the folder of runs"
    return folder


@pytest.mark.parametrize(("name", "state"), ENDS.items())
def test_a_replay_ends_as_the_run(replayed: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str) -> None:
    monkeypatch.setattr(run_folder, "STARTUP_GRACE_S", 0.0)
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
    assert Replay(source, tmp_path, "steered", 0).folder.changes.read_bytes() == source.changes.read_bytes()


def test_times_are_divided_by_the_speed_and_it_is_marked_as_a_replay(tmp_path: Path) -> None:
    source = recorded(tmp_path)
    events = list(read_events(source.events))[:8]
    for index, event in enumerate(events):
        event["t"] = 1000.0 + 2 * index
    source.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    playing = Replay(source, tmp_path, "again", 20)
    playing.play()
    played = list(read_events(playing.folder.events))
    assert 0.7 * 0.9 < played[-1]["t"] - played[0]["t"] < 0.7 + 1.0  # seven gaps of 2 s at 20 times the speed
    assert [event["seq"] for event in played] == list(range(len(played)))
    assert any(event.get("sentence", "").startswith("A replay of the run healthy-grpo") for event in played)


def test_it_holds_the_lock_and_obeys_a_stop(tmp_path: Path) -> None:
    source = recorded(tmp_path)
    verb = ["replay", str(source.path), "--speed", "0.001", "--runs-dir", str(tmp_path)]
    program = [sys.executable, "-m", "backend", *verb]
    process = subprocess.Popen(program, cwd=project_root(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = RunFolder(Path(process.stdout.readline().strip()))
    while not folder.has_event_log:
        time.sleep(0.01)
    assert folder.is_locked()
    process.send_signal(signal.SIGTERM)
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
        Replay(source, tmp_path)
