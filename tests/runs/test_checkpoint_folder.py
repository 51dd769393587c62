"""Checkpoints are complete or absent, the newest few and the best are kept, and leftovers of a killed process are
deleted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import pytest

from backend.runs import checkpoint
from backend.runs.checkpoint import arrays_of, newest
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import TrainingState, all_checkpoints, state_of
from backend.trainer.machine import MEMORY, gpu_error
from backend.utils import disk
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
    for saved, loaded in ((WEIGHTS, arrays_of(newest_one, "weights")), (MOMENTS, arrays_of(newest_one, "optimizer"))):
        assert saved.keys() == loaded.keys()
        assert all(loaded[key].dtype == saved[key].dtype and mx.array_equal(loaded[key], saved[key]) for key in saved)


def test_a_checkpoint_may_have_a_reference_and_no_optimizer(run: RunFolder) -> None:
    checkpoint.save(run, TrainingState(step=1), WEIGHTS, None, WEIGHTS, is_full_model=False, keep=3)
    saved = newest(run)
    assert saved and not saved.has_optimizer and saved.has_reference
    assert all(mx.array_equal(array, WEIGHTS[name]) for name, array in arrays_of(saved, "reference").items())


def test_an_incomplete_folder_is_no_checkpoint(run: RunFolder) -> None:
    assert newest(run) is None
    save(run, 1)
    for step, missing in ((2, "adapters.safetensors"), (3, "optimizer.safetensors"), (4, "state.json")):
        (save(run, step, keep=9) / missing).unlink()
    for step, text in ((5, ""), (6, "[]"), (7, '{"step": 7')):
        (save(run, step, keep=9) / "state.json").write_text(text)
    assert steps(run) == [1]


def test_what_an_earlier_version_did_not_record_is_named() -> None:
    """Less what cannot have had another value then."""
    state, missing = state_of({name: value for name, value in asdict(TrainingState(step=3)).items() if name != "gain"})
    assert state == TrainingState(step=3) and missing == ("gain",)
    _, missing = state_of({"step": 3})
    assert "cursor" in missing and "began" not in missing and "step" not in missing
    assert state_of({"cursor": 3})[0] is None, "no state without a step"


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

    monkeypatch.setattr(disk, "sync", full)
    with pytest.raises(UserError, match=r"disk: .*/000002 cannot be written: the disk is full\."):
        save(run, 2)
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["000001"] and steps(run) == [1]


def test_a_gpu_error_while_saving_is_not_taken_for_a_full_disk(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are RuntimeErrors of mlx; one is mended by a new process, the other by the user."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(failing_gpu.OUT_OF_MEMORY)

    monkeypatch.setattr(mx, "save_safetensors", refuse)
    with pytest.raises(RuntimeError, match="Insufficient Memory") as raised:
        save(run, 1)
    assert gpu_error(raised.value) is MEMORY
    assert not list(run.checkpoints.iterdir())
