"""Checkpoints are complete or absent, the newest few and the best are kept, and leftovers of a killed process are
deleted."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from backend.runs import checkpoint
from backend.runs.checkpoint import arrays_of, newest, newest_whole
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import TrainingState, all_checkpoints
from backend.trainer.machine import MEMORY, gpu_error
from tests.support import failing_gpu

WEIGHTS = {"layers.0.lora_a": mx.array([[1.0, -0.0]]), "layers.0.lora_b": mx.array([3.0])}
MOMENTS = {"step": mx.array(7, mx.uint64), "layers.0.lora_a.m": mx.array([[0.5, 0.25]])}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def save(run: RunFolder, step: int, score: float | None = None, *, keep: int = 3, is_full_model: bool = False) -> Path:
    state = TrainingState(step=step, score=score)
    return checkpoint.save(run, state, WEIGHTS, MOMENTS, is_full_model=is_full_model, keep=keep)


def steps(run: RunFolder) -> list[int]:
    return [saved.state.step for saved in all_checkpoints(run)]


@pytest.mark.parametrize("is_full_model", [False, True])
def test_a_checkpoint_loads_as_it_was_saved(run: RunFolder, is_full_model: bool) -> None:
    state = TrainingState(100, updates=200, cursor=300, num_tokens=4000, elapsed_s=5.5, events_bytes=6000)
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


def test_an_incomplete_folder_is_no_checkpoint_and_one_of_a_later_version_is(run: RunFolder) -> None:
    assert newest(run) is None
    file = save(run, 1) / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"of_tomorrow": 1}))
    for step, missing in ((2, "adapters.safetensors"), (3, "optimizer.safetensors"), (4, "state.json")):
        (save(run, step, keep=9) / missing).unlink()
    for step, text in ((5, ""), (6, "[]"), (7, '{"step": 7'), (8, '{"cursor": 3}')):
        (save(run, step, keep=9) / "state.json").write_text(text)
    assert steps(run) == [1]


def test_leftovers_of_a_killed_process_are_ignored_and_deleted_by_the_next_save(run: RunFolder) -> None:
    path = save(run, 1)
    for name in (".000002", ".000001.old"):
        path.rename(run.checkpoints / name) if name == ".000002" else (run.checkpoints / name).mkdir()
    assert newest(run) is None
    save(run, 2)
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["000002"]
    (run.checkpoints / "000002").rename(run.checkpoints / ".000002.old")  # killed while it saved step 2 again
    assert newest_whole(run)[0] == newest(run) and steps(run) == [2]


@pytest.mark.parametrize(
    ("scores", "keep", "kept"),
    [((0.1, 0.9, 0.2, None, 0.3, 0.4), 2, [2, 5, 6]), ((0.1, 0.9, 0.9, 0.9, 0.2, 0.2), 1, [2, 6])],
    ids=["the newest few and the best", "a score is repeated until the next evaluation"],
)
def test_rotation(run: RunFolder, scores: tuple[float | None, ...], keep: int, kept: list[int]) -> None:
    for step, score in enumerate(scores, 1):
        save(run, step, score, keep=keep)
    assert steps(run) == kept


def test_a_gpu_error_while_saving_is_not_taken_for_a_full_disk(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are RuntimeErrors of mlx; one is mended by a new process, the other by the user."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(failing_gpu.OUT_OF_MEMORY)

    monkeypatch.setattr(mx, "save_safetensors", refuse)
    with pytest.raises(RuntimeError, match="Insufficient Memory") as raised:
        save(run, 1)
    assert gpu_error(raised.value) is MEMORY
    assert not list(run.checkpoints.iterdir())
