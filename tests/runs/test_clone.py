"""Clones: a warm one goes on as its parent would, a cold one starts from its weights; what does not fit is refused."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.config.config import load
from backend.runs import checkpoint
from backend.runs.archive import summary
from backend.runs.checkpoint import arrays_of, examine
from backend.runs.clone import clone
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder, all_runs
from backend.runs.run_record import Parent, read_parent, write_parent
from backend.runs.steering import Change, write_changes
from backend.trainer.run_process import train
from backend.utils.errors import UserError
from tests.support import made_up_runs, small_run
from tests.support.small_run import numbers, rows, same, trained

SETTINGS: dict[str, Any] = (
    {"iters": 5, "group_size": 4, "num_iterations": 2, "learning_rate": 1e-3, "epsilon": 1e-3, "dropout": 0.1}
    | {"lr_schedule": "cosine", "lr_warmup_steps": 2, "lr_final": 1e-5, "save_every": 1, "keep_checkpoints": 9}
    | {"steps_per_eval": 2, "validation_split": 0.25, "val_batches": 1, "max_completion_length": 5, "top_k": 0}
    | {"beta": 0.05, "entropy_adaptive": True, "reward_weight_schedule": "adaptive", "run_name": "parent"}
)


def continued(run: RunFolder) -> RunFolder:
    assert train(load(run.config), run, command="a test").kind == "finished"
    return run


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Five steps, with a change that holds from step 2 and one that a clone of step 3 does not inherit."""
    folder = tmp_path_factory.mktemp("inputs")
    raw = small_run.settings_for(folder, **small_run.low_half(folder) | SETTINGS)
    run = RunFolder(tmp_path_factory.mktemp("runs") / "parent")
    run.path.mkdir()
    write_changes(run, [Change(2, {"temperature": (0.8, 1.1)})])
    return trained(raw, run)


def weights(run: RunFolder, step: int) -> dict[str, np.ndarray]:
    saved = next(each for each in checkpoint.all_checkpoints(run) if each.state.step == step)
    return {name: np.array(x) for name, x in (arrays_of(saved, "weights") | arrays_of(saved, "optimizer")).items()}


def test_a_warm_clone_without_changes_continues_as_its_parent_bit_for_bit(parent: RunFolder, tmp_path: Path) -> None:
    run = clone(parent, "3", name="twin", runs_dir=tmp_path)
    *_, last = read_events(run.events)
    assert (last["kind"], last["step"], last["reason"]) == ("stopped", 3, "cloned")
    assert (summary(run).state, summary(run).step, summary(run).iterations) == ("stopped", 3, 5)
    assert (summary(run).began or 0) > (summary(parent).began or 0), "the start of its parent was shown"
    assert (run.adapters / "adapters.safetensors").read_bytes() == (
        parent.checkpoints / "000003" / "adapters.safetensors"
    ).read_bytes()
    continued(run)
    assert same(weights(run, 5), weights(parent, 5))
    assert numbers(run) == numbers(parent)
    assert run.completions.read_text() == parent.completions.read_text()
    assert load(run.config).temperature == 1.1, "the parent's change before the step is a setting of the clone"
    seqs = [event["seq"] for event in read_events(run.events)]
    assert seqs == list(range(len(seqs)))


def test_a_clone_without_the_optimizer_goes_on_and_notices_damage(parent: RunFolder, tmp_path: Path) -> None:
    """Its state named no files, so that the optimizer, never saved, was missed; and that of any clone had no sums."""
    raw = load(parent.config).model_dump() | {"save_only_model": True, "iters": 2, "entropy_adaptive": False}
    run = clone(trained(raw, RunFolder(tmp_path / "light")), "1")
    (saved,) = run.checkpoints.iterdir()
    assert examine(run, saved) == "" and not (saved / "optimizer.safetensors").exists()
    assert checkpoint.newest(continued(run)) is not None
    other = clone(parent, "3", name="damaged", runs_dir=tmp_path)
    (saved,) = other.checkpoints.iterdir()
    arrays = saved / "adapters.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"?")
    assert "adapters.safetensors" in examine(other, saved)
    with pytest.raises(UserError, match=r"step 3 cannot be used: adapters\.safetensors is not as it was written"):
        clone(other, "3")


def test_a_full_fine_tuned_run_is_cloned_too(parent: RunFolder, tmp_path: Path) -> None:
    raw = load(parent.config).model_dump() | {"train_type": "full", "iters": 2, "entropy_adaptive": False}
    full = trained(raw, RunFolder(tmp_path / "full"))
    assert same(weights(continued(clone(full, "1")), 2), weights(full, 2))
    cold = clone(full, "2", {"iters": 1, "optimizer": "sgd"}, warm=False)
    (begun,) = checkpoint.all_checkpoints(cold)
    source = next(each for each in checkpoint.all_checkpoints(full) if each.state.step == 2)
    assert same(small_run.arrays(begun.weights_file), small_run.arrays(source.weights_file))
    continued(cold)


def test_the_length_of_a_clone_is_not_its_parents(tmp_path: Path) -> None:
    """A clone of 64 steps whose start is in the middle of its event log, which is not read, had done “64 of 32”."""
    run = made_up_runs.make_run(tmp_path / "run", steps=3, total=3, ending="finished")
    assert summary(run).iterations == 3
    run.config.write_text("model: a\niters: 6\n")
    write_parent(run, Parent("parent", tmp_path / "parent", 3, True, {"iters": (3, 6)}))
    os.utime(run.parent, (time.time() + 60,) * 2)
    assert summary(run).iterations == 6


def test_what_was_changed_is_used_kept_and_marked(parent: RunFolder, tmp_path: Path) -> None:
    changes = {"learning_rate": 5e-3, "max_completion_length": 3, "iters": 4, "entropy_adaptive": False, "seed": 7}
    run = clone(parent, "3", changes, runs_dir=tmp_path)
    (begun,) = checkpoint.all_checkpoints(run)
    assert begun.state.bonus == [], "the bonus begins where the clone's settings have it"
    assert run.name == "parent-from-3" and load(run.config).run_name == ""
    expected = {key: (SETTINGS.get(key, 0), value) for key, value in changes.items()}
    assert read_parent(run) == Parent("parent", parent.path, 3, True, expected)
    assert summary(run).iterations == 4
    continued(run)
    _, change = [event for event in read_events(run.events) if event["kind"] == "change"]
    assert (change["step"], set(change["settings"])) == (4, set(changes))
    assert [step for kind, step, _ in numbers(run) if kind == "step"] == [1, 2, 3, 4]
    assert not same(weights(run, 4), weights(parent, 4))
    assert max(c["tokens"] for row in rows(run) if row["step"] == 4 for c in row["completions"]) <= 3


def test_another_reward_forgets_what_was_scored_before(parent: RunFolder, tmp_path: Path) -> None:
    """A score in other units would stay the best for ever."""
    run = clone(parent, "3", {"reward_functions": ["r1_int"], "reward_functions_file": None}, runs_dir=tmp_path)
    (saved,) = checkpoint.all_checkpoints(run)
    assert saved.state.score is None and saved.state.best_score is None and not saved.state.reward_weights
    continued(run)


@pytest.mark.parametrize("reference", ["base", "clone"])
def test_a_cold_clone_starts_over_from_the_weights(parent: RunFolder, tmp_path: Path, reference: Any) -> None:
    changes = {"iters": 1, "optimizer": "lion", "num_iterations": 1, "dropout": 0}
    run = clone(parent, "4", changes, warm=False, runs_dir=tmp_path, reference=reference)
    assert (summary(run).state, summary(run).iterations, summary(run).step) == ("stopped", 1, None)
    (saved,) = checkpoint.all_checkpoints(run)
    source = next(each for each in checkpoint.all_checkpoints(parent) if each.state.step == 4)
    assert saved.state == checkpoint.TrainingState()
    assert same(small_run.arrays(saved.weights_file), small_run.arrays(source.weights_file))
    assert all(not np.any(np.array(x)) for name, x in arrays_of(saved, "optimizer").items() if name.endswith(".m"))
    continued(run)
    assert [event["kind"] for event in read_events(run.events)].count("stopped") == 0
    assert [step for kind, step, _ in numbers(run) if kind == "step"] == [1]
    kl = next(metrics["kl"] for kind, _, metrics in numbers(run) if kind == "step")
    assert abs(kl) < 1e-6 if reference == "clone" else kl > 1e-6, "from what it starts from, or from the base"
    assert rows(run)[0]["prompt"] == rows(parent)[0]["prompt"]


@pytest.mark.parametrize(
    ("which", "changes", "more", "says"),
    [
        ("3", {"rank": 4}, {}, "Rank belongs to the weights that a clone starts from"),
        ("3", {"train_type": "dora"}, {"warm": False}, "Fine-tune belongs to the weights"),
        ("3", {"optimizer": "sgd"}, {}, "Optimizer cannot change where a clone goes on"),
        ("3", {"temperature": -1, "beta": -1}, {}, "Beta (KL weight) must be at least 0"),
        ("3", {"learnin_rate": 1}, {}, "Did you mean learning_rate?"),
        ("last", {}, {}, "A clone that goes on after step 5 needs more than 5 Iterations."),
        ("9", {}, {}, "has no checkpoint 9; there are 1, 2, 3, 4, 5"),
        ("3", {}, {"reference": "clone"}, "Only a cold clone"),
        ("3", {}, {"name": "parent"}, "There is a run parent already"),
    ],
)
def test_a_clone_that_cannot_be_is_refused_and_leaves_nothing(
    parent: RunFolder, which: str, changes: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    before = sorted(parent.path.parent.iterdir())
    with pytest.raises(UserError) as refusal:
        clone(parent, which, changes, **more)
    assert says in str(refusal.value)
    assert sorted(parent.path.parent.iterdir()) == before


def test_a_name_that_a_file_has_is_taken(parent: RunFolder, tmp_path: Path) -> None:
    for name in ("note", "parent-from-3"):
        (tmp_path / name).write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="There is a run note already"):
        clone(parent, "3", runs_dir=tmp_path, name="note")
    assert clone(parent, "3", runs_dir=tmp_path).name == "parent-from-3-2"
    assert (tmp_path / "parent-from-3").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("writes", ["backend.runs.clone._copy_head", "shutil.copyfile"])
def test_a_full_disk_leaves_no_clone(parent: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: str):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writes, full)
    with pytest.raises(UserError, match=r"cannot be cloned to .*: the disk is full\."):
        clone(parent, "3", runs_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_parent_is_found_after_a_move(parent: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(parent.path, tmp_path / "a" / "parent")
    first = clone(RunFolder(tmp_path / "a" / "parent"), "2", name="first")
    second = clone(first, "last", {"learning_rate": 1e-4}, name="second", warm=False)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = {run.name: run for run in all_runs(tmp_path / "b")}
    of_second, of_first = read_parent(moved[second.name]), read_parent(moved["first"])
    assert of_second and (of_second.run, of_second.step, of_second.warm) == ("first", 2, False)
    assert of_first and (of_first.run, of_first.step, of_first.warm) == ("parent", 2, True)
    assert read_parent(moved["parent"]) is None
    moved["first"].parent.write_text("{")
    with pytest.raises(UserError, match="does not tell the parent of the run"):
        read_parent(moved["first"])
