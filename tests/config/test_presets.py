"""Presets: each loads, has a title and a sentence, changes only the settings it may, and previews its changes."""

from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from app.state.draft import Draft
from app.state.presets import BROUGHT, Preset, presets
from app.widgets.menu_dialogs import PresetPanel
from backend.config import config
from backend.config.config import SETTINGS, parse
from backend.sampling.row_costs import QUANTIZED
from backend.trainer.memory.estimate import GB, Estimate, estimate_run
from backend.trainer.memory.model_shape import shape_from
from backend.utils import places
from tests.support.cases import cases

MINE = {"model": "me/mine", "data": "me/rows", "prompt_feature": "q", "answer_feature": "a"}
MINE |= {"reward_functions": ["r1_count_xml"], "reward_weights": [3.0], "reward_functions_file": ""}
ALL = presets()


@pytest.fixture
def draft(tmp_path: Path, qapp) -> Draft:
    draft = Draft(tmp_path / "draft.yaml")
    draft.update(MINE)
    return draft


@pytest.mark.parametrize("candidate", ALL, ids=lambda candidate: candidate.name)
def test_a_preset_is_valid_is_previewed_and_keeps_model_data_and_rewards_unless_it_says_so(
    candidate: Preset, draft: Draft
):
    before = draft.values()
    changed = {about.key: after for about, _, after in candidate.changes(before)}
    draft.apply(candidate)
    assert draft.config() and not draft.problems()
    assert candidate.sentence.endswith(".") and len(candidate.title) < 30
    loaded = config.read(places.resources() / "presets" / f"{candidate.name}.yaml")
    assert config.problems({"model": "a/b", "data": "a/b"} | loaded) == []
    assert {key: draft.value(key) for key in changed} == changed
    assert all(draft.value(key) == before[key] for key in SETTINGS if key not in changed)
    assert candidate.changes(draft.values()) == []
    kept = [key for key, value in MINE.items() if draft.value(key) == value]
    brought = [key for key in MINE if key in BROUGHT] if candidate.brings else []
    assert candidate.replaces or set(kept) >= {key for key in MINE if key not in brought}
    assert (kept == list(MINE)) == (not candidate.replaces and not candidate.brings)
    assert candidate.replaces == (candidate.title in ("Demo", "Calculator (tools)", "Shapes (images)"))
    assert candidate.brings == (candidate.title in ("GSM8K", "DeepMath"))


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


QWEN3: dict[str, Any] = (
    {"model_type": "qwen3", "torch_dtype": "bfloat16", "tie_word_embeddings": True, "vocab_size": 151936}
    | {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
)


def estimated(machine: float = 16 * GB, *, gpu: bool = True, **settings: Any) -> Estimate:
    config = parse({"model": "m", "data": "d.jsonl", "quantization": "4", "max_completion_length": 256} | settings)
    shape = shape_from(QWEN3)
    assert shape is not None
    return estimate_run(config, shape, int(machine), 80, gpu=gpu)


@cases(
    ("settings", "dtype", "says"),
    [
        ({}, "float32", "16 bits are slow, so the run computes in float32 (Precision"),
        ({"quantization": "4"}, "float32", "packed weights are slow, so the run computes in float32, to which"),
        ({"memory_limit": 2.5}, "auto", ", and there are 2.5 GB: sampling takes about 6 times"),
        ({"memory_limit": 2.5, "quantization": "4"}, "auto", "packed weights are slow, and float32 would need"),
        ({"dtype": "bfloat16"}, "bfloat16", "16 bits are slow: sampling takes about 6 times"),
        ({"dtype": "float32"}, "float32", ""),
        ({"train_type": "full"}, "auto", ""),
    ],
)
def test_on_a_cpu_automatic_is_float32_where_memory_allows(settings: dict[str, Any], dtype: str, says: str) -> None:
    made = {"group_size": 8, "max_seq_length": 512, "quantization": "none"} | settings
    on_cpu, on_gpu = (estimated(64 * GB, gpu=gpu, **made) for gpu in (False, True))
    chosen = on_cpu.memory.config.dtype, on_gpu.memory.config.dtype
    assert chosen == (dtype, settings.get("dtype", "auto"))
    assert says in on_cpu.speed_note and bool(says) == bool(on_cpu.speed_note)
    assert on_gpu.speed_note == "" and on_cpu.fits


def test_with_short_memory_rows_are_given_up_by_tiles() -> None:
    free = estimated(group_size=96)
    assert free.plan.rows == 96
    rows = {estimated(share * free.rollout.total, group_size=96).plan.rows for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)}
    assert {64, 32} & rows and rows <= set(QUANTIZED.fewer(96))
    assert "KV cache" in estimated(group_size=48).rollout.sizes
    assert estimated(group_size=48).plan.rows == 32 and not estimated(group_size=48).reductions
