"""The field for adapters to start from: its list of runs, and the settings that come with a chosen one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.pages.train.train_page import TrainPage
from app.state.prefs import Prefs
from app.state.session import Session
from app.widgets.form.fields import AdapterField
from backend.runs.run_folder import RunFolder
from backend.utils import places
from backend.utils.errors import ConfigProblem
from tests.support.trainer_by_hand import add_checkpoints


@pytest.fixture
def run(apart: Path) -> RunFolder:
    """A run with two checkpoints, as its files look."""
    run = RunFolder(places.runs_folder() / "first")
    add_checkpoints(run, {2: 0.9, 4: 0.1})
    run.adapters.mkdir()
    (run.adapters / "adapters.safetensors").write_bytes(b"x")
    lora = {"rank": 5, "scale": 7.0, "keys": ["self_attn.q_proj"]}
    about = {"fine_tune_type": "dora", "num_layers": 3, "model": "someone/base", "lora_parameters": lora}
    (run.adapters / "adapter_config.json").write_text(json.dumps(about))
    run.config.write_text("model: someone/base\n")
    return run


def test_run_as_adapter(qtbot, tmp_path: Path, run: RunFolder) -> None:
    page = TrainPage(session := Session(Prefs(tmp_path / "prefs")))
    qtbot.addWidget(page)
    session.draft.update({"model": "", "rank": 8})
    field = page.form.fields["adapter"]
    assert isinstance(field, AdapterField)
    menu = field.browse.menu()
    assert menu is not None
    menu.aboutToShow.emit()
    of_run = next(action.menu() for action in menu.actions() if action.text() == "first")
    of_run.aboutToShow.emit()
    labels = {action.text(): action for action in of_run.actions()}
    assert list(labels) == ["End, step 4", "Best, step 2", "Step 4", "Step 2"]
    labels["Best, step 2"].trigger()
    taken = {"adapter": "first@best", "train_type": "dora", "rank": 5, "scale": 7.0, "num_layers": 3}
    taken["lora_keys"] = ["self_attn.q_proj"]
    assert {key: session.draft.value(key) for key in taken} == taken
    assert field.control.text() == "first@best" and session.draft.value("model") == "someone/base"
    session.draft.use_adapter("gone")
    assert session.draft.value("adapter") == "gone" and session.draft.value("rank") == 5


def test_peft_adapter(qtbot, tmp_path: Path) -> None:
    (folder := tmp_path / "checkpoint-200").mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    page = TrainPage(session := Session(Prefs(tmp_path / "prefs")))
    qtbot.addWidget(page)
    session.draft.update({"model": "someone/base"})
    field = page.form.fields["adapter"]
    assert isinstance(field, AdapterField) and field.import_button.isHidden()
    asked: dict[str, Any] = {}
    session.service.ask = lambda question, on_answer, **how: asked.update(how, question=question, answer=on_answer)
    for path in (folder, folder / "adapter_model.safetensors"):
        field.take(str(path))
        assert not field.import_button.isHidden()
        field.import_button.click()
        assert (asked["question"], asked["folder"], asked["model"]) == ("import_adapter", str(folder), "someone/base")
        assert not field.import_button.isEnabled()
    asked["on_progress"]({"sentence": "Comparing.", "done": None})
    assert shown_note(field) == "Comparing."
    asked["on_refused"]([ConfigProblem("file", "x has no place.")])
    assert shown_note(field) == "x has no place." and field.import_button.isEnabled()
    (imported := tmp_path / "checkpoint-200-mlx").mkdir()
    (imported / "adapters.safetensors").write_bytes(b"x")
    about = {"lora_parameters": {"rank": 6, "scale": 2.0}, "modules_to_save": ["model.norm"]}
    (imported / "adapter_config.json").write_text(json.dumps(about))
    asked["answer"]({"path": str(imported), "sentences": ["14 layers.", "A note."]})
    assert field.value() == str(imported) and field.import_button.isHidden()
    assert session.draft.value("rank") == 6 and session.draft.value("modules_to_save") == ["model.norm"]
    assert shown_note(field) == "14 layers. A note."


def shown_note(field: AdapterField) -> str:
    assert field._note is not None
    return field._note.text() if not field._note.isHidden() else ""
