"""The draft: raw values in, problems and YAML out, nothing lost between launches; every change can be undone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PySide6.QtGui import QUndoStack

from app.state.draft import PAUSE_S, Draft
from app.state.presets import presets
from app.state.run_summary import details, summary
from backend.config import config
from backend.config.config import SETTINGS
from backend.utils import places
from backend.utils.errors import UserError


@pytest.fixture
def draft(tmp_path: Path, qapp) -> Draft:
    return Draft(tmp_path / "draft.yaml")


def with_model_and_data(draft: Draft) -> Draft:
    draft.update({"model": "someone/model", "data": "someone/data"})
    return draft


def sentences(draft: Draft, key: str) -> list[str]:
    return [fault.sentence for fault in draft.problems() if fault.setting == key]


def test_a_half_typed_value_is_kept_and_is_a_problem(draft: Draft):
    with_model_and_data(draft).set("learning_rate", "1e-")
    assert draft.value("learning_rate") == "1e-"
    assert sentences(draft, "learning_rate") == ["Learning Rate must be a number, not '1e-'."]
    draft.set("learning_rate", "1e-5")
    assert not draft.problems()
    assert draft.config().learning_rate == 1e-5


def test_a_broken_reward_file_is_one_problem_with_its_line(draft: Draft, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("\n\ndef mine(:\n")
    with_model_and_data(draft).update({"reward_functions_file": str(file), "reward_functions": ["mine"]})
    assert not sentences(draft, "reward_functions"), "what a broken file would have registered cannot be known"
    assert "line 3" in sentences(draft, "reward_functions_file")[0]


def test_a_broken_tools_file_is_a_problem(draft: Draft, tmp_path: Path):
    file = tmp_path / "tools.py"
    with_model_and_data(draft).set("tools_file", str(file))
    assert "tools.py" in sentences(draft, "tools_file")[0], "it is not there"
    file.write_text("def add(a: int")
    for mode in ("grpo", "sft"):  # which shows the tools in its prompts
        draft.set("train_mode", mode)
        assert "line 1" in sentences(draft, "tools_file")[0]
    file.write_text("def add(a: int): ...")
    assert not draft.problems()


def test_what_a_quantised_model_cannot_is_a_problem_before_the_run(draft: Draft, tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization": {"bits": 4, "group_size": 64}}')
    with_model_and_data(draft).update({"model": str(tmp_path), "train_type": "full"})
    assert "choose LoRA" in sentences(draft, "train_type")[0]
    draft.update({"train_type": "lora", "quantization": "4"})
    assert "already" in sentences(draft, "quantization")[0] and not sentences(draft, "train_type")
    draft.set("quantization", "none")
    assert not draft.problems()


def test_keys_of_other_trainings_are_left_out_and_listed(draft: Draft, tmp_path: Path):
    text = "model: a/b\ndata: a/b\ntrain: true\nqat_bits: 8\njudge: null\ndpo_cpo_loss_type: sigmoid\ndelta: 50.0\n"
    (tmp_path / "theirs.yaml").write_text(
        text + "optimizer: adamw\noptimizer_config: {adamw: {betas: [0.8, 0.9]}, muon: {}}\n"
    )
    draft.load(tmp_path / "theirs.yaml")
    assert draft.translation is not None
    left_out = [word.word for word in draft.translation.words if word.fate == "without effect"]
    assert left_out == ["train", "qat_bits", "dpo_cpo_loss_type", "delta"]
    assert draft.config().delta is None, "their delta is DPO's, and would have clipped our ratio"
    assert (draft.config().adam_beta1, draft.config().adam_beta2) == (0.8, 0.9)


def test_the_defaults_of_another_programs_file_can_be_changed_for_ours_and_back(draft: Draft, tmp_path: Path):
    (tmp_path / "trl.yaml").write_text("model_name_or_path: a/b\ndataset_name: a/b\nper_device_train_batch_size: 8\n")
    draft.load(tmp_path / "trl.yaml")

    def shown() -> list[object]:
        return [draft.value(key) for key in ("train_type", "group_size", "batch_size", "seed")]

    assert shown() == ["full", 8, 1, 42] and not draft.dirty
    assert draft.as_yaml().startswith("# From trl.yaml, a file for TRL: 3 settings converted; TRL's defaults for the")
    draft.set("seed", 7)
    draft.use_defaults("ours")
    assert shown() == ["lora", 4, 2, 7], "what was edited stays"
    assert draft.translation is not None and not draft.translation.defaults
    draft.history.undo()
    assert shown() == ["full", 8, 1, 7] and draft.translation.defaults
    draft.use_defaults("ours")
    draft.use_defaults("theirs")
    assert shown() == ["full", 8, 1, 7]
    draft.save(tmp_path / "ours.yaml")
    draft.load(tmp_path / "ours.yaml")
    assert shown() == ["full", 8, 1, 7] and draft.translation is None


@pytest.mark.parametrize(("text", "word"), [("- a", "a list"), ("a: [", "line")])
def test_a_file_without_settings_changes_nothing(draft: Draft, tmp_path: Path, text: str, word: str):
    (tmp_path / "bad.yaml").write_text(text)
    draft.set("seed", 7)
    with pytest.raises(UserError, match=word):
        draft.load(tmp_path / "bad.yaml")
    assert draft.value("seed") == 7 and draft.path is None


def test_problems_of_a_file_are_told_and_the_rest_is_loaded(draft: Draft, tmp_path: Path):
    (tmp_path / "bad.yaml").write_text(
        "model: a/b\nlerning_rate: 1e-4\nzzz: 2\nlora_parameters: {rank: 3, rnk: 4}\niters: many\n"
        "gruop_size: 2\ngrop_size: 4\nbatchsize: 4\nbatch_size: 2\n"
    )
    draft.set("seed", 7)
    draft.load(tmp_path / "bad.yaml")
    found = draft.file_problems
    assert found is not None
    unclear = dict.fromkeys(("zzz", "rnk", "gruop_size", "grop_size", "batchsize"), "")
    assert {each.key: each.meant for each in found.unread} == unclear | {"lerning_rate": "learning_rate"}
    assert draft.value("rank") == 3 and draft.value("iters") == "many" and {"iters", "rank"} <= {*found.settings}
    assert draft.value("seed") == 0 and draft.path == tmp_path / "bad.yaml" and not draft.dirty
    draft.set("seed", 9)
    draft.correct_key(next(each for each in found.unread if each.meant))
    assert draft.value("learning_rate") == "1e-4" and draft.value("seed") == 9 and draft.dirty
    assert draft.file_problems is not None and "learning_rate" in draft.file_problems.settings
    assert {each.key for each in draft.file_problems.unread} == unclear.keys()


def test_dirty_means_different_from_the_file(draft: Draft, tmp_path: Path):
    with_model_and_data(draft).save(tmp_path / "c.yaml")
    assert not draft.dirty
    draft.set("learning_rate", "2e-5")
    assert draft.dirty
    draft.set("learning_rate", "1e-5")
    assert not draft.dirty, "1e-5 typed and 1e-05 read are one number"


@pytest.mark.parametrize("epochs", ["x", 2])
def test_restore_brings_back_invalid_values_and_the_path(draft: Draft, tmp_path: Path, epochs: Any):
    """And the iterations beside epochs, for which a config has no use."""
    with_model_and_data(draft).save(tmp_path / "c.yaml")
    draft.update({"learning_rate": "oops", "epochs": epochs, "iters": 7, "system_prompt": "Zeile 1\nZeile 2 – ü"})
    draft.flush()
    second = Draft(draft.autosave)
    second.restore(tmp_path / "c.yaml")
    assert second.values() == draft.values() and second.value("iters") == 7
    assert second.path == tmp_path / "c.yaml" and second.dirty
    second.set("learning_rate", "1e-5")
    assert ("iters" in second.as_yaml()) is (epochs == "x")


def test_unwritable_autosave(tmp_path: Path, qtbot):
    draft = Draft(tmp_path / "no" / "such" / "folder" / "draft.yaml")
    draft.set("seed", 11)
    with qtbot.waitSignal(draft.save_failed) as emitted:
        draft.flush()
    assert "cannot be written" in emitted.args[0]
    assert draft.value("seed") == 11


def test_summary_and_details_of_a_run(draft: Draft):
    def told(*figures: Any, **options: Any) -> tuple[str, list[str]]:
        settings = draft.sound_config()
        return summary(settings, *figures).replace("\u00a0", " "), details(settings, **options)

    with_model_and_data(draft).update(
        {"group_size": 8, "batch_size": "4", "gradient_accumulation_steps": 4, "iters": 60}
    )
    assert told()[0] == "8 completions for each of 16 prompts a step, 60 steps."
    assert "7,680 completions in all" in told()[1]
    draft.set("iters", "-3")
    assert "-3" not in told()[0] and not any("in all" in phrase for phrase in told()[1])
    draft.set("iters", 60)
    draft.update({"adapter": "/runs/first", "output_regex": "[0-9]+"})
    assert {"Goes on from the adapter first", "Output follows a regular expression"} < set(told()[1])
    draft.update({"adapter": "", "output_regex": ""})
    assert "60 steps, about 1 h 20 min, 9.8 GB." in told(0.625, "9.8 GB")[0]
    draft.update({"num_layers": -1, "beta": "0", "reward_functions": []})
    said = ["LoRA of rank 8 on all layers of model", "Scored by 5 reward functions", "No KL penalty"]
    assert told()[1][:3] == said and told()[1][-1] == "Evaluated before and after, saved at the end"
    assert told(holds_out=False)[1][-1] == "No held-out rows to evaluate on, saved at the end"
    draft.set("iters", 200)
    assert told()[1][-1] == "Evaluated every 200 steps, saved every 100 steps"
    draft.update({"save_every": -1, "steps_per_eval": -1})
    assert told()[1][-1] == "Evaluated every epoch, saved every epoch"
    draft.set("val_batches", 0)
    assert told()[1][-1] == "Not evaluated during training, saved every epoch"


def test_the_command_names_the_file_on_disk(draft: Draft, tmp_path: Path):
    with_model_and_data(draft).flush()
    assert draft.command()[-2:] == ["train", str(tmp_path / "draft.yaml")]
    assert config.load(draft.command()[-1]) == draft.config()
    draft.save(tmp_path / "c d.yaml")
    assert draft.command_text().endswith("c d.yaml'"), "a path with a space is quoted"


def test_the_demo_is_recognised_until_it_is_changed(draft: Draft, tmp_path: Path, monkeypatch):
    (tmp_path / "demo.yaml").write_text("model: a/b\ndata: a/b\niters: 60\n")
    monkeypatch.setattr(places, "demo_config", lambda: tmp_path / "demo.yaml")
    draft.load(tmp_path / "demo.yaml", as_preset=True)
    draft.flush()
    assert draft.is_demo
    assert draft.path is None
    assert draft.command()[-1] == str(tmp_path / "demo.yaml")
    assert not draft.autosave.exists(), "the next version may bring another demo"
    draft.set("iters", 61)
    draft.flush()
    assert not draft.is_demo
    assert draft.command()[-1] == str(draft.autosave)
    draft.set("iters", 60)
    draft.flush()
    assert not draft.autosave.exists()


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("app.state.draft.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def history(draft: Draft, clock: SimpleNamespace) -> QUndoStack:
    return draft.history


def type_into(draft: Draft, key: str, text: str) -> None:
    for end in range(1, len(text) + 1):
        draft.set(key, text[:end])


def test_typing_without_a_pause_is_one_step(draft: Draft, history: QUndoStack, clock: SimpleNamespace):
    type_into(draft, "run_name", "first")
    assert (history.count(), history.undoText()) == (1, "Run folder name")
    history.undo()
    assert draft.value("run_name") == ""
    history.redo()
    assert draft.value("run_name") == "first"
    clock.now += PAUSE_S  # a pause or another field starts a new step
    draft.set("run_name", "ab")
    draft.set("seed", 7)
    draft.set("run_name", "abc")
    assert history.count() == 4
    for _ in range(3):
        history.undo()
    assert (draft.value("run_name"), draft.value("seed")) == ("first", 0)


def test_undoing_an_opened_file_restores_the_previous_file_too(draft: Draft, history: QUndoStack, tmp_path: Path):
    (tmp_path / "a.yaml").write_text("model: a/b\ndata: a/b\nseed: 3\n")
    (tmp_path / "b.yaml").write_text("model: a/b\ndata: a/b\nseed: 4\n")
    draft.load(tmp_path / "a.yaml")
    draft.load(tmp_path / "b.yaml")
    assert history.undoText() == "Open b.yaml"
    history.undo()
    assert (draft.value("seed"), draft.path, draft.dirty) == (3, tmp_path / "a.yaml", False)
    history.undo()
    assert (draft.value("seed"), draft.path) == (0, None)
    history.redo()
    history.redo()
    assert (draft.value("seed"), draft.path) == (4, tmp_path / "b.yaml")


def test_a_preset_and_a_new_config_are_one_step_each(draft: Draft, history: QUndoStack):
    before = draft.values()
    dapo = next(preset for preset in presets() if preset.title == "DAPO")
    draft.apply(dapo)
    draft.reset()
    assert (history.count(), history.undoText()) == (2, "New config")
    history.undo()
    assert history.undoText() == "DAPO"
    assert draft.value("grpo_loss_type") == "dapo"
    history.undo()
    assert draft.values() == before


def test_every_setting_can_be_undone(draft: Draft, history: QUndoStack):
    before = draft.values()
    for key in SETTINGS:
        draft.set(key, "something else")
    while history.canUndo():
        history.undo()
    assert draft.values() == before
