"""Checkpoints are complete or absent, the newest few and the best are kept, and leftovers of a killed process are
deleted."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.runs.checkpoints import checkpoint
from backend.runs.checkpoints.checkpoint import TrainingState, all_checkpoints, first_start, newest, state_of
from backend.runs.run_folder import RunFolder
from backend.trainer.machine import MEMORY, gpu_error
from backend.utils import whole_file
from backend.utils.errors import UserError
from tests.support import failing_gpu

WEIGHTS = {"layers.0.lora_a": mx.array([[1.0, -0.0]]), "layers.0.lora_b": mx.array([3.0])}
MOMENTS = {"step": mx.array(7, mx.uint64), "layers.0.lora_a.m": mx.array([[0.5, 0.25]])}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def save(run: RunFolder, step: int, score: float | None = None, *, keep: int = 3, is_full_model: bool = False) -> Path:
    return checkpoint.save(
        run, TrainingState(step=step, score=score), WEIGHTS, MOMENTS, is_full_model=is_full_model, keep=keep
    )


def steps(run: RunFolder) -> list[int]:
    return [saved.state.step for saved in all_checkpoints(run)]


@pytest.mark.parametrize("is_full_model", [False, True])
def test_a_checkpoint_loads_as_it_was_saved(run: RunFolder, is_full_model: bool) -> None:
    state = TrainingState(
        step=100, updates=200, cursor=300, num_tokens=4000, elapsed_s=5.5, events_bytes=6000, completions_bytes=7000
    )
    path = checkpoint.save(run, state, WEIGHTS, MOMENTS, is_full_model=is_full_model, keep=3)
    assert path == run.checkpoints / "000100"
    name = "model.safetensors" if is_full_model else "adapters.safetensors"
    assert sorted(file.name for file in path.iterdir()) == sorted([name, "optimizer.safetensors", "state.json"])
    newest_one = newest(run)
    assert newest_one and newest_one.state == state and newest_one.path == path and newest_one.has_optimizer
    for saved, loaded in ((WEIGHTS, newest_one.weights()), (MOMENTS, newest_one.optimizer())):
        assert saved.keys() == loaded.keys()
        assert all(loaded[key].dtype == saved[key].dtype and mx.array_equal(loaded[key], saved[key]) for key in saved)


def test_a_checkpoint_may_have_a_reference_and_no_optimizer(run: RunFolder) -> None:
    checkpoint.save(run, TrainingState(step=1), WEIGHTS, None, WEIGHTS, is_full_model=False, keep=3)
    saved = newest(run)
    assert saved and not saved.has_optimizer and saved.has_reference
    assert all(mx.array_equal(array, WEIGHTS[name]) for name, array in saved.reference().items())


def test_an_incomplete_folder_is_no_checkpoint(run: RunFolder) -> None:
    assert newest(run) is None
    save(run, 1)
    for step, missing in ((2, "adapters.safetensors"), (3, "optimizer.safetensors"), (4, "state.json")):
        (save(run, step, keep=9) / missing).unlink()
    for step, text in ((5, ""), (6, "[]"), (7, '{"step": 7')):
        (save(run, step, keep=9) / "state.json").write_text(text)
    assert steps(run) == [1]


def test_a_run_begins_with_nothing_done_counted_or_scored() -> None:
    """As does whatever an earlier version has not recorded. Step 0 is still to be evaluated."""
    assert {name: value for name, value in asdict(TrainingState()).items() if value} == {"evaluated": -1}


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("step", [3], [None, 1.5, True, "3", [3]]),
        ("elapsed_s", [3, 1.5], [None, False, "3"]),
        ("score", [None, 3, -1.5], [True, "", {}]),
        ("score_metric", ["", "kl"], [None, True, 3]),
        ("best_is_lowest", [True, False], [None, "x", 1]),
        ("bonus", [[], [None, 1, 0.5]], [None, {}, "x", [0.5, "x"]]),
        ("reward_weights", [[], [{}, {"a": 1}]], [None, {}, [{}, 0.5]]),
    ],
)
def test_a_state_has_values_of_the_types_of_its_fields_or_is_none(
    name: str, right: list[Any], wrong: list[Any]
) -> None:
    for value in right:
        state, _ = state_of({"step": 3, name: value})
        assert state is not None and getattr(state, name) == value
    for value in wrong:
        assert state_of({"step": 3, name: value})[0] is None, value


def test_what_an_earlier_version_did_not_record_is_named() -> None:
    """Less what cannot have had another value then."""
    state, missing = state_of({name: value for name, value in asdict(TrainingState(step=3)).items() if name != "gain"})
    assert state == TrainingState(step=3) and missing == ("gain",)
    _, missing = state_of({"step": 3})
    assert "cursor" in missing and "began" not in missing and "step" not in missing
    assert state_of({"cursor": 3})[0] is None, "no state without a step"


def test_the_first_start_of_a_run_is_that_of_its_first_process(run: RunFolder) -> None:
    assert first_start(run) is None
    events = [("note", 1.0), ("started", 2.0), ("step", 3.0), ("started", 4.0)]
    run.events.write_text("".join(json.dumps({"kind": kind, "t": t}) + "\n" for kind, t in events))
    assert first_start(run) == 2.0


def test_unknown_keys_of_a_later_version_s_state_are_ignored(run: RunFolder) -> None:
    file = save(run, 5) / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"of_tomorrow": 1}))
    loaded = newest(run)
    assert loaded and loaded.state.step == 5


def test_leftovers_of_a_killed_process_are_ignored_and_deleted_by_the_next_save(run: RunFolder) -> None:
    path = save(run, 1)
    for name in (".000002", ".000001.old"):
        path.rename(run.checkpoints / name) if name == ".000002" else (run.checkpoints / name).mkdir()
    assert newest(run) is None
    save(run, 2)
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["000002"]


def test_saving_a_step_again_replaces_it(run: RunFolder) -> None:
    save(run, 1, 0.5)
    save(run, 1, 0.75)
    assert steps(run) == [1] and all_checkpoints(run)[0].state.score == 0.75
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["000001"]


def test_the_newest_checkpoint_is_the_highest_step_not_the_last_name(run: RunFolder) -> None:
    for step in (999_999, 1_000_000, 20):
        save(run, step, keep=9)
    assert steps(run) == [20, 999_999, 1_000_000]


def test_rotation_keeps_the_newest_few_and_the_best(run: RunFolder) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, None), (5, 0.3), (6, 0.4)):
        save(run, step, score, keep=2)
    assert steps(run) == [2, 5, 6]


def test_the_best_checkpoint_is_the_one_that_was_evaluated(run: RunFolder) -> None:
    """A score is repeated until the next evaluation; only the first checkpoint that has it was evaluated."""
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.9), (4, 0.9), (5, 0.2), (6, 0.2)):
        save(run, step, score, keep=1)
    assert steps(run) == [2, 6]


def test_a_failed_save_is_a_mistake_and_leaves_older_checkpoints_alone(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_file, "sync", full)
    with pytest.raises(UserError, match=r"disk: .*/000002 cannot be written: the disk is full\."):
        save(run, 2)
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["000001"] and steps(run) == [1]


def test_a_folder_that_cannot_be_made_is_the_same_mistake(run: RunFolder) -> None:
    run.checkpoints.parent.mkdir(exist_ok=True)
    run.checkpoints.write_text("a file, not a folder")
    with pytest.raises(
        UserError, match=r"disk: .*/000002 cannot be written: a file of its folder's name is in the way\."
    ):
        save(run, 2)


def test_a_leftover_that_cannot_be_deleted_does_not_fail_the_save(run: RunFolder) -> None:
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / ".000009").write_text("a file, where only folders are expected")
    save(run, 1)
    assert steps(run) == [1]


def test_a_gpu_error_while_saving_is_not_taken_for_a_full_disk(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are RuntimeErrors of mlx; one is mended by a new process, the other by the user."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(failing_gpu.OUT_OF_MEMORY)

    monkeypatch.setattr(mx, "save_safetensors", refuse)
    with pytest.raises(RuntimeError, match="Insufficient Memory") as raised:
        save(run, 1)
    assert gpu_error(raised.value) is MEMORY
    assert not list(run.checkpoints.iterdir())


def test_drafts_of_processes_that_are_gone_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "mine")
    run.adapters.mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    drafts = [run.adapters / f".adapter_config.json.{gone.pid}", run.path / f".changes.json.{gone.pid}"]
    kept = [run.path / f".control.{os.getpid()}", run.path / "notes.1", run.path / ".hidden"]
    for file in drafts + kept:
        file.touch()
    checkpoint.clear_leftovers(run)
    assert not [file for file in drafts if file.exists()]
    assert all(file.exists() for file in kept)
