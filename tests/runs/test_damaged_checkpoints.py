"""A checkpoint not as written is noticed, set aside and said; the run goes on from the one before, to the same end."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

from backend.__main__ import app as command_line
from backend.runs import checkpoint
from backend.runs.checkpoint import arrays_of, examine, newest_whole, set_aside
from backend.runs.events import RUN_FORMAT, check_format, read_events
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from tests.support import small_run

STEPS = 4


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    saved = {"iters": STEPS, "save_every": 1, "keep_checkpoints": 9, "learning_rate": 1e-3}
    return small_run.settings_for(folder, **small_run.low_half(folder) | saved)


@pytest.fixture(scope="module")
def whole(raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run with a checkpoint of every step."""
    run = small_run.trained(raw, RunFolder(tmp_path_factory.mktemp("whole") / "run"))
    assert [saved.state.step for saved in checkpoint.all_checkpoints(run)] == [1, 2, 3, 4]
    return run


@pytest.fixture
def run(whole: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy to damage."""
    shutil.copytree(whole.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def last(run: RunFolder) -> Path:
    return run.checkpoints / f"{STEPS:06d}"


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-5] + bytes([content[-5] ^ 4]) + content[-4:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def contents(run: RunFolder) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path != run.config}


def with_state(**changes: Any) -> Callable[[RunFolder], None]:
    def change(run: RunFolder) -> None:
        file = last(run) / "state.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def rewritten(name: str, change: Callable[[dict[str, mx.array]], Any]) -> Callable[[RunFolder], None]:
    def rewrite(run: RunFolder) -> None:
        arrays: Any = mx.load(str(last(run) / name))
        change(arrays)
        mx.save_safetensors(str(last(run) / name), arrays, metadata={"format": "mlx"})

    return rewrite


def reshape(arrays: dict[str, mx.array]) -> None:
    arrays[next(name for name in sorted(arrays) if arrays[name].ndim == 2)] = mx.zeros((1, 1))


MISSING, CHANGED = "is missing or not valid", "is not as it was written"
DAMAGES: dict[str, tuple[Callable[[RunFolder], None], str]] = {
    "cut": (lambda run: cut(last(run) / "adapters.safetensors"), CHANGED),
    "a bit of the weights": (lambda run: flip(last(run) / "adapters.safetensors"), CHANGED),
    "a bit of the moments": (lambda run: flip(last(run) / "optimizer.safetensors"), CHANGED),
    "empty state": (lambda run: (last(run) / "state.json").write_text(""), MISSING),
    "list for a state": (lambda run: (last(run) / "state.json").write_text("[]"), MISSING),
    "step of text": (with_state(step="x"), MISSING),
    "no optimizer": (lambda run: (last(run) / "optimizer.safetensors").unlink(), MISSING),
    "no weights": (lambda run: (last(run) / "adapters.safetensors").unlink(), MISSING),
    "another run's": (with_state(began=1.5), "was saved by another run than the one in events.jsonl"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed_and_the_one_before_is_taken(run: RunFolder, name: str) -> None:
    damage, why = DAMAGES[name]
    damage(run)
    before = contents(run)
    saved, damaged = newest_whole(run)
    assert saved is not None and saved.state.step == STEPS - 1
    (only,) = damaged
    assert only.path == last(run) and why in only.why and examine(run, only.path) == only.why
    assert examine(run, saved.path) == ""
    assert contents(run) == before


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_named(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (last(run) / "adapters.safetensors").unlink()
    _, (damaged,) = newest_whole(run)

    def rename(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(UserError, match=r"is damaged and cannot be renamed: Permission denied\."):
        set_aside(damaged)


def test_what_is_whole_is_taken(run: RunFolder) -> None:
    saved, damaged = newest_whole(run)
    assert saved is not None and saved.state.step == STEPS and not damaged
    for folder in ("000009-copy", "0000010²"):  # numbers at the beginning only, or such as no program of ours writes
        (run.checkpoints / folder).mkdir()
    with_state(files=None)(run)  # of an earlier version
    saved, damaged = newest_whole(run)
    assert saved is not None and saved.state.step == STEPS and not damaged


def test_a_run_that_was_killed_before_its_first_save_begins_again(tmp_path: Path) -> None:
    run, lines = RunFolder(tmp_path), ['{"kind": "started", "t": 1.0}', '{"kind": "step", "step": 1}']
    run.events.write_text("\n".join([*lines, ""]))
    assert newest_whole(run) == (None, [])
    run.events.write_text("\n".join([*lines, '{"kind": "checkpoint", "step": 1}', ""]))
    with pytest.raises(UserError, match="had saved checkpoints, and they are gone"):
        newest_whole(run)


@pytest.mark.parametrize(
    ("damage", "has_sums"),
    [
        (lambda run: flip(last(run) / "adapters.safetensors"), True),
        (rewritten("adapters.safetensors", lambda arrays: arrays.pop(min(arrays))), False),
        (rewritten("optimizer.safetensors", reshape), False),
        (lambda run: cut(last(run) / "optimizer.safetensors"), False),
    ],
    ids=["bit", "missing array", "other shape", "cut"],
)
def test_the_run_goes_on_from_the_one_before_to_the_same_end(
    raw: dict[str, Any], whole: RunFolder, run: RunFolder, damage: Callable[[RunFolder], None], has_sums: bool
) -> None:
    """Without sums, as an earlier version left it, a checkpoint looks whole until the model is loaded, by which time
    the event log is cut back to the damaged one."""
    damage(run)
    if not has_sums:
        with_state(files=None)(run)
    ending = small_run.train_here(raw, run)
    assert (ending.kind, ending.step) == ("finished", STEPS)
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert names == ["000001", "000002", "000003", "000004", "damaged-000004"]
    mine, theirs = (checkpoint.newest(each) for each in (run, whole))
    assert mine and theirs and mine.state.step == STEPS
    for name, array in arrays_of(mine, "weights").items():
        assert np.array_equal(np.array(array), np.array(arrays_of(theirs, "weights")[name]))
    events = list(read_events(run.events))
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3, 4]
    assert [event["seq"] for event in events] == list(range(len(events)))
    (note,) = [event for event in events if event["kind"] == "note" and "damaged-000004" in event["sentence"]]
    assert note["level"] == "warning" and "The checkpoint of step 4 cannot be used: " in note["sentence"]
    assert next(event["resumed_from"] for event in events if event.get("resumed_from")) == STEPS - 1


def test_without_a_whole_one_nothing_starts_over(raw: dict[str, Any], run: RunFolder) -> None:
    for folder in run.checkpoints.iterdir():
        flip(folder / "adapters.safetensors")
    before = contents(run)
    with pytest.raises(
        UserError,
        match=r"No checkpoint of the run run is whole \(000004: adapters.safetensors is not as .* as a new run",
    ):
        small_run.train_here(raw, run)
    assert contents(run) == before
    shutil.rmtree(run.checkpoints)
    with pytest.raises(UserError, match="had saved checkpoints, and they are gone"):
        small_run.train_here(raw, run)
    run.events.unlink()  # asked for: nothing of it is left
    assert newest_whole(run) == (None, [])


def test_the_state_of_an_earlier_version_is_filled_in(raw: dict[str, Any], run: RunFolder) -> None:
    file = last(run) / "state.json"
    state = json.loads(file.read_text())
    missing = ("v", "files", "evaluated", "gain", "began")
    file.write_text(json.dumps({name: value for name, value in state.items() if name not in missing}))
    assert small_run.train_here(raw | {"iters": 5}, run).step == 5


@pytest.mark.parametrize("where", ["diary", "state", "changes"])
def test_a_newer_version_s_run_is_refused_and_not_touched(run: RunFolder, where: str) -> None:
    newer = RUN_FORMAT + 1
    if where == "diary":
        with run.events.open("a") as event_log:
            event_log.write(json.dumps({"v": newer, "seq": 99, "t": 1.0, "kind": "of tomorrow"}) + "\n")
    elif where == "state":
        with_state(v=newer)(run)
    else:
        run.changes.write_text(json.dumps({"v": newer, "changes": {"of": "another form"}}))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.path.rglob("*") if path.is_file()}
    said = f"has format {newer} and this version of GRPO Studio knows formats up to {RUN_FORMAT}"
    export = ["export", "--to", "folder", "--folder", str(run.path.parent), "--format", "adapter"]
    others = [["clone"], ["evaluate"], ["generate", "--prompt", "a"], export]
    for verb, *more in (["resume", "--set", "iters=9"], *others):
        result = CliRunner().invoke(command_line(), [verb, str(run.path), *more])
        assert (result.exit_code, said in result.stderr) == (2, True), (verb, result.output)
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.path.rglob("*") if path.is_file()}
    assert after == before
    with pytest.raises(UserError):
        check_format(run)
