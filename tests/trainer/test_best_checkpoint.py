"""Which checkpoint is the best, the run that ends with it or goes back to one, evaluations in batches of their own, and
checkpoints without an optimizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.runs import checkpoint
from backend.runs.checkpoint import go_back, last_step
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import all_checkpoints, best_of, find_checkpoint, find_choice
from backend.trainer.control import handlers_restored
from backend.trainer.evaluation.comparison import find_evaluated
from backend.trainer.run_context import RunContext
from tests.support import small_run
from tests.support.small_run import arrays, notes, same

HELD_OUT = {"validation_split": 0.25, "val_batches": 1, "steps_per_eval": 1, "save_every": 1, "keep_checkpoints": 1}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    return small_run.settings_for(folder, **small_run.low_half(folder), learning_rate=1e-3, iters=4)


@pytest.fixture(scope="module")
def saved_each_step(raw: dict[str, Any]) -> dict[str, Any]:
    return raw | {"save_every": 1, "keep_checkpoints": 9, "iters": 3}


@pytest.fixture(scope="module")
def three_steps(saved_each_step: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run with a checkpoint of each of its three steps, which tests copy."""
    run = RunFolder(tmp_path_factory.mktemp("three") / "run")
    with handlers_restored():
        assert small_run.train_here(saved_each_step, run).kind == "finished"
    return run


@pytest.fixture
def copied(three_steps: RunFolder, run: RunFolder) -> RunFolder:
    """A copy of it to change."""
    shutil.copytree(three_steps.path, run.path)
    return run


def evaluated(monkeypatch: pytest.MonkeyPatch, scores: dict[int, dict[str, float]]) -> None:
    """Evaluations with these metrics, by step."""
    monkeypatch.setattr(RunContext, "held_out", lambda self, problems, count, step, *_: scores[step])


@pytest.mark.parametrize(
    ("metric", "lowest", "best"), [("", False, 2), ("eval/completions/mean_length", True, 3), ("eval/reward", True, 1)]
)
def test_the_metric_of_the_settings_decides_and_its_best_checkpoint_is_kept(
    raw: dict[str, Any], run: RunFolder, monkeypatch: pytest.MonkeyPatch, metric: str, lowest: bool, best: int
) -> None:
    rewards, lengths = [0.5, 0.1, 0.9, 0.3, 0.4], [9, 8, 7, 3, 5]
    pairs = zip(rewards, lengths, strict=True)
    evaluated(monkeypatch, {i: {"reward": r, "completions/mean_length": n} for i, (r, n) in enumerate(pairs)})
    small_run.train_here(raw | HELD_OUT | {"best_metric": metric, "best_is_lowest": lowest}, run)
    assert [saved.step for saved in all_checkpoints(run)] == [best, 4]
    found = best_of(all_checkpoints(run))
    assert found is not None and found.step == best and found.state.score_metric == metric
    assert found.state.score == (lengths if "length" in metric else rewards)[best]


@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_load_best(raw: dict[str, Any], run: RunFolder, monkeypatch: pytest.MonkeyPatch, train_type: str) -> None:
    evaluated(monkeypatch, {step: {"reward": 1.0 if step == 2 else 0.1 * step} for step in range(8)})
    # Saved every 3 steps, so that the best is saved for being the best.
    best = raw | HELD_OUT | {"load_best_at_end": True, "save_every": 3, "train_type": train_type}
    small_run.train_here(best, run)
    assert "The run ends with the weights of step 2, its best checkpoint, with reward 1." in notes(run)
    *_, last = read_events(run.events)
    assert (last["kind"], last["step"], last["ends_with"]) == ("finished", 4, 2)
    weights = find_checkpoint(run, "2").weights_file
    assert find_choice(run).step == 2 and find_checkpoint(run, "last").step == 4
    assert [find_evaluated(str(run.path), None, which=which).step for which in ("end", "last")] == [2, 4]
    if train_type == "lora":
        assert same(arrays(run.adapters / "adapters.safetensors"), arrays(weights))
    else:
        kept = arrays(run.model / "model.safetensors")
        trained = arrays(weights)
        assert all(np.array_equal(kept[name], x.astype(kept[name].dtype)) for name, x in trained.items())
    small_run.train_here(best | {"iters": 5, "load_best_at_end": False}, run)
    assert small_run.steps(run) == [1, 2, 3, 4, 5]
    if train_type == "lora":
        assert same(arrays(run.adapters / "adapters.safetensors"), arrays(find_checkpoint(run, "5").weights_file))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_save_only_model(raw: dict[str, Any], run: RunFolder, tmp_path: Path, optimizer: str) -> None:
    """Plain SGD has no moments, so its run goes on as if nothing had been left out; AdamW's does not."""
    light = raw | {"save_only_model": True, "optimizer": optimizer, "learning_rate": 1e-2, "iters": 3}
    whole = RunFolder(tmp_path / "whole")
    small_run.train_here(light, whole)
    assert small_run.train_here(light, run, small_run.stop_after(run, 2)).kind == "stopped"
    (saved,) = all_checkpoints(run)
    assert sorted(file.name for file in saved.path.iterdir()) == ["adapters.safetensors", "state.json"]
    assert set(json.loads((saved.path / "state.json").read_text())["files"]) == {"adapters.safetensors"}
    assert small_run.train_here(light, run).kind == "finished"
    assert any(note.startswith("The checkpoint of step 2 has no optimizer state") for note in notes(run))
    first, second = (checkpoint.newest(each) for each in (run, whole))
    assert first is not None and second is not None and first.state.updates == second.state.updates
    assert same(arrays(first.weights_file), arrays(second.weights_file)) == (optimizer == "sgd")


def test_a_run_goes_back_to_a_checkpoint(saved_each_step: dict[str, Any], copied: RunFolder) -> None:
    """Without changes it becomes what it was, to the last bit."""
    before, completions = arrays(find_checkpoint(copied, "3").weights_file), copied.completions.read_text()
    assert last_step(copied) == 3
    sentence = go_back(copied, "1")
    assert sentence == "The run was taken back from step 3 to its checkpoint of step 1, and continues from there."
    assert [saved.step for saved in all_checkpoints(copied)] == [1] and not copied.is_locked()
    assert small_run.train_here(saved_each_step, copied).kind == "finished"
    assert small_run.steps(copied) == [1, 2, 3] and copied.completions.read_text() == completions
    assert same(arrays(find_checkpoint(copied, "3").weights_file), before)
