"""Which checkpoint is the best, the run that ends with it or goes back to one, adapters that start from trained ones,
and the settings that a checkpoint was trained with."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from app.state.chat import run_choice
from app.state.prefs import Prefs
from app.state.session import Session
from backend.runs import archive, checkpoint
from backend.runs.checkpoint import go_back, last_step
from backend.runs.clone import clone
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import read_record
from backend.runs.saved_weights import all_checkpoints, best_of, find_checkpoint, find_choice
from backend.runs.steering import run_config
from backend.sampling.chat import find_source
from backend.trainer.evaluation.comparison import find_evaluated
from backend.trainer.run_context import RunContext
from tests.support import made_up_runs, small_run
from tests.support.small_run import arrays, check, notes, same
from tests.support.trainer_by_hand import add_checkpoints

HELD_OUT = {"validation_split": 0.25, "val_batches": 1, "steps_per_eval": 1, "save_every": 1, "keep_checkpoints": 1}


@pytest.fixture(scope="module")
def best_raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    return small_run.settings_for(folder, **small_run.low_half(folder), learning_rate=1e-3, iters=4)


@pytest.fixture(scope="module")
def saved_each_step(best_raw: dict[str, Any]) -> dict[str, Any]:
    return best_raw | {"save_every": 1, "keep_checkpoints": 9, "iters": 3}


@pytest.fixture(scope="module")
def three_steps(saved_each_step: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run with a checkpoint of each of its three steps, which tests copy."""
    return small_run.trained(saved_each_step, RunFolder(tmp_path_factory.mktemp("three") / "run"))


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
    best_raw: dict[str, Any], run: RunFolder, monkeypatch: pytest.MonkeyPatch, metric: str, lowest: bool, best: int
) -> None:
    rewards, lengths = [0.5, 0.1, 0.9, 0.3, 0.4], [9, 8, 7, 3, 5]
    pairs = zip(rewards, lengths, strict=True)
    evaluated(monkeypatch, {i: {"reward": r, "completions/mean_length": n} for i, (r, n) in enumerate(pairs)})
    small_run.train_here(best_raw | HELD_OUT | {"best_metric": metric, "best_is_lowest": lowest}, run)
    assert [saved.step for saved in all_checkpoints(run)] == [best, 4]
    found = best_of(all_checkpoints(run))
    assert found is not None and found.step == best and found.state.score_metric == metric
    assert found.state.score == (lengths if "length" in metric else rewards)[best]


@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_load_best(best_raw: dict[str, Any], run: RunFolder, monkeypatch: pytest.MonkeyPatch, train_type: str) -> None:
    evaluated(monkeypatch, {step: {"reward": 1.0 if step == 2 else 0.1 * step} for step in range(8)})
    # Saved every 3 steps, so that the best is saved for being the best.
    best = best_raw | HELD_OUT | {"load_best_at_end": True, "save_every": 3, "train_type": train_type}
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
def test_save_only_model(best_raw: dict[str, Any], run: RunFolder, tmp_path: Path, optimizer: str) -> None:
    """Plain SGD has no moments, so its run goes on as if nothing had been left out; AdamW's does not."""
    light = best_raw | {"save_only_model": True, "optimizer": optimizer, "learning_rate": 1e-2, "iters": 3}
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


@pytest.fixture(scope="module")
def raw(inputs: Path) -> dict[str, Any]:
    about = {"learning_rate": 1e-2, "iters": 2, "save_every": 1, "max_completion_length": 3, "keep_checkpoints": 9} | {
        "reward_functions": ["low_half"]
    }
    return small_run.settings_for(inputs, layers=2, **small_run.low_half(inputs) | about, beta=0.1)


@pytest.fixture(scope="module")
def first(raw: dict[str, Any], inputs: Path) -> RunFolder:
    """The run that others start from."""
    run = RunFolder(inputs / "runs" / "first")
    small_run.train_here(raw, run)
    return run


def starts(raw: dict[str, Any], run: RunFolder, adapter: object, **changes: Any) -> RunFolder:
    assert small_run.train_here(raw | {"adapter": str(adapter)} | changes, run).kind == "finished"
    return run


def test_a_run_starts_from_the_arrays_that_are_named(raw: dict[str, Any], first: RunFolder, run: RunFolder) -> None:
    """At step 0 its checkpoint is theirs; the reference stays the base model, so the KL is not 0."""
    named = {first.path: "2", f"{first.path}@1": "1", first.adapters: "2"}
    named[find_checkpoint(first, "1").weights_file] = "1"
    for number, (adapter, step) in enumerate(named.items()):
        begun = starts(raw, RunFolder(run.path / str(number)), adapter, iters=1)
        assert same(arrays(find_checkpoint(begun, "0").weights_file), arrays(find_checkpoint(first, step).weights_file))
        (step_event,) = small_run.events(begun, "step")
        assert step_event["metrics"]["kl"] > 1e-4
    assert any("The adapters start from" in event.get("sentence", "") for event in read_events(begun.events))


def test_a_start_equals_a_cold_clone(raw: dict[str, Any], first: RunFolder, run: RunFolder, tmp_path: Path) -> None:
    begun = starts(raw, run, f"{first.path}@1")
    cloned = clone(first, "1", warm=False, name="cold", runs_dir=tmp_path)
    assert small_run.train_here(yaml.safe_load(cloned.config.read_text()), cloned).kind == "finished"
    assert same(arrays(find_checkpoint(begun, "2").weights_file), arrays(find_checkpoint(cloned, "2").weights_file))
    assert begun.completions.read_text() == cloned.completions.read_text()


def test_a_resume_needs_no_adapter(raw: dict[str, Any], first: RunFolder, run: RunFolder, tmp_path: Path) -> None:
    whole = starts(raw, RunFolder(tmp_path / "whole"), first.adapters)
    lent = Path(shutil.copytree(first.adapters, tmp_path / "lent"))
    assert small_run.train_here(raw | {"adapter": str(lent)}, run, small_run.stop_after(run, 1)).step == 1
    shutil.rmtree(lent)
    shutil.rmtree(find_checkpoint(run, "1").path)  # as a kill in step 1 leaves it
    starts(raw, run, lent)
    assert same(arrays(find_checkpoint(run, "2").weights_file), arrays(find_checkpoint(whole, "2").weights_file))
    assert run.completions.read_text() == whole.completions.read_text()


@pytest.mark.parametrize(
    ("changes", "setting", "says"),
    [
        ({"rank": 4}, "rank", "Rank is 4, and the adapter to start from has 2; set it to 2."),
        ({"scale": 1.0}, "scale", "Scale is 1.0, and the adapter to start from has 20.0; set it to 20.0."),
        ({"train_type": "dora"}, "train_type", "Fine-tune is dora, and the adapter to start from has lora"),
        ({"num_layers": 1}, "adapter", "which this run does not train (Layers, Target modules)"),
        ({"lora_keys": ["self_attn.q_proj"]}, "adapter", "which this run does not train (Layers, Target modules)"),
        ({"modules_to_save": ["mlp"]}, "adapter", "which this run trains (Modules to save)"),
        ({"train_type": "full"}, "adapter", "Full fine-tuning has no adapter to start from"),
        ({"adapter": "nowhere"}, "adapter", "There is no adapter nowhere: no folder with adapters.safetensors"),
        ({"adapter": "{first}@9"}, "adapter", "has no checkpoint 9; choose one of end, best, 2, 1."),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    raw: dict[str, Any], first: RunFolder, changes: dict[str, Any], setting: str, says: str
) -> None:
    changes = {key: str(x).format(first=first.path) if key == "adapter" else x for key, x in changes.items()}
    faults = check(raw | {"adapter": str(first.path)} | changes)
    assert [fault.setting for fault in faults] == [setting]
    assert says in faults[0].sentence and len(faults[0].sentence) <= 200


BEGAN, ENDED = 0.9, 0.7


@pytest.fixture
def steered_run(tmp_path: Path) -> RunFolder:
    """A run whose temperature was changed before step 15, with checkpoints of steps 10 and 20."""
    run = made_up_runs.make_run(tmp_path / "steered", steps=20, total=20, temperature=BEGAN)
    add_checkpoints(run, {10: None, 20: None})
    changes = [{"step": 15, "settings": {"temperature": [BEGAN, ENDED]}}]
    run.changes.write_text(json.dumps({"v": 1, "changes": changes}))
    return run


def test_chat_evaluation_and_clone_have_those_of_the_checkpoint(steered_run: RunFolder) -> None:
    for step, temperature in (("10", BEGAN), ("20", ENDED)):
        assert run_config(steered_run, int(step)).temperature == temperature
        assert find_source(str(steered_run.path), step).config.temperature == temperature
        assert find_evaluated(str(steered_run.path), None, which=step).config.temperature == temperature


def test_lists_and_forms_have_those_of_the_end(steered_run: RunFolder, tmp_path: Path, qapp) -> None:
    assert archive.raw_settings(steered_run)["temperature"] == ENDED
    assert read_record(steered_run).setting("temperature") == ENDED
    assert run_choice(steered_run).settings["temperature"] == ENDED
    session = Session(Prefs(tmp_path / "prefs"))
    assert session.load_settings(steered_run)
    assert session.draft.value("temperature") == ENDED
    assert session.messages.current and "as they were at its end" in session.messages.current.sentence


def test_a_damaged_list_of_changes_is_told(steered_run: RunFolder, tmp_path: Path, qapp) -> None:
    steered_run.changes.write_text("{")
    session = Session(Prefs(tmp_path / "prefs"))
    before = session.draft.values()
    assert not session.load_settings(steered_run) and session.draft.values() == before
    assert session.messages.current and "changes.json is not valid JSON" in session.messages.current.sentence
    assert "changes.json is not valid JSON" in run_choice(steered_run).problem
    assert archive.raw_settings(steered_run)["temperature"] == BEGAN
