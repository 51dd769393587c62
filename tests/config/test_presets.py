"""Presets: each loads, has a title and a sentence, changes only the settings it may, and previews its changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from app.state.draft import Draft
from app.state.presets import BROUGHT, Preset, preset, presets
from app.widgets.menu_dialogs import PresetPanel
from backend.config import config
from backend.config.config import SETTINGS
from backend.utils import places
from backend.utils.errors import UserError

MINE = {"model": "me/mine", "data": "me/rows", "prompt_feature": "q", "answer_feature": "a"}
MINE |= {"reward_functions": ["r1_count_xml"], "reward_weights": [3.0], "reward_functions_file": ""}
ALL = presets()


@pytest.fixture
def draft(tmp_path: Path, qapp) -> Draft:
    draft = Draft(tmp_path / "draft.yaml")
    draft.update(MINE)
    return draft


@pytest.mark.parametrize("candidate", ALL, ids=lambda candidate: candidate.name)
def test_every_preset_gives_a_valid_config(candidate: Preset, draft: Draft):
    draft.apply(candidate)
    assert not draft.problems()
    assert draft.config()
    assert candidate.sentence.endswith(".") and len(candidate.title) < 30
    loaded = config.read(places.resources() / "presets" / f"{candidate.name}.yaml")
    assert config.problems({"model": "a/b", "data": "a/b"} | loaded) == []


@pytest.mark.parametrize("candidate", ALL, ids=lambda candidate: candidate.name)
def test_a_preset_keeps_model_data_and_rewards_unless_it_says_so(candidate: Preset, draft: Draft):
    draft.apply(candidate)
    kept = [key for key, value in MINE.items() if draft.value(key) == value]
    brought = [key for key in MINE if key in BROUGHT] if candidate.brings else []
    assert candidate.replaces or set(kept) >= {key for key in MINE if key not in brought}
    assert (kept == list(MINE)) == (not candidate.replaces and not candidate.brings)
    assert candidate.replaces == (candidate.title in ("Demo", "Calculator (tools)", "Shapes (images)"))
    assert candidate.brings == (candidate.title in ("GSM8K", "DeepMath"))


@pytest.mark.parametrize("candidate", ALL, ids=lambda candidate: candidate.name)
def test_the_preview_of_a_preset_is_what_it_changes(candidate: Preset, draft: Draft):
    before = draft.values()
    changed = {about.key: after for about, _, after in candidate.changes(before)}
    draft.apply(candidate)
    assert {key: draft.value(key) for key in changed} == changed
    assert all(draft.value(key) == before[key] for key in SETTINGS if key not in changed)
    assert candidate.changes(draft.values()) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("iters: 5\n", "two comment lines"),
        ("# Title\n# A sentence.\nitres: 5\n", "iters"),
        ("# Title\n# A sentence.\ntemperature: 0\n", "Temp must be above 0"),
        ("# Title\n# A sentence.\nmodel: a/b\n", "does not say that it replaces"),
        ("# Title\n# A sentence.\nreward_weights: [1]\n", "does not say that it replaces"),
    ],
)
def test_an_invalid_preset_file_is_refused_with_a_sentence(tmp_path: Path, text: str, why: str):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=why):
        preset(tmp_path / "bad.yaml")


@pytest.fixture
def panel(draft: Draft, qtbot) -> PresetPanel:
    panel = PresetPanel(ALL, draft.values())
    panel.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose, False)
    panel.taken.connect(draft.apply)
    qtbot.addWidget(panel)
    panel.show()
    return panel


def test_the_panel_previews_and_changes_nothing_until_apply(panel: PresetPanel, draft: Draft):
    panel.list.setCurrentRow(6)
    rows = panel.model.rows
    assert ("Importance", "Token", "Sequence (GSPO)") in rows or any(row[0] == "Importance" for row in rows)
    assert ("Beta (KL weight)", "0.1", "0") in rows
    assert "stay as they are" in panel.keeps.text()
    assert draft.value("beta") == 0.1
    panel.reject()
    assert draft.value("beta") == 0.1


def test_a_preset_is_chosen_and_applied_by_keyboard(panel: PresetPanel, draft: Draft):
    panel.list.setFocus()
    for _ in range(7):
        QTest.keyClick(panel.list, Qt.Key.Key_Down)
    assert panel.chosen.title == "DAPO"
    QTest.keyClick(panel.list, Qt.Key.Key_Return)
    assert draft.value("grpo_loss_type") == "dapo"
    assert draft.value("model") == "me/mine"
