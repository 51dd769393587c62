"""The form against the guide to GRPO that users come from, MLX LoRA Studio's: its words, order, pickers and toggles."""

from itertools import groupby

import pytest
from PySide6.QtWidgets import QApplication

from app.pages.train.train_page import TrainPage
from app.widgets.form.setting_search import matching_settings
from backend.config import first_choices
from backend.config.config import SECTIONS, SETTINGS, dump, parse
from backend.config.setting import DOCUMENTED
from backend.rewards.catalogue import builtin_rewards
from tests.support.windows import ServiceByHand


def pairs(text: str) -> dict[str, str]:
    return dict(pair.split(": ") for pair in text.replace("\n", " ").split(", "))


LABELS = pairs("""\
Base model: model, Dataset: data, LM Studio export name: lm_studio_name, Fine-tune: train_type, Layers: num_layers,
Rank: rank, Scale: scale, Dropout: dropout, Quantization: quantization, Iterations: iters, Epochs: epochs,
Batch: batch_size, Max Seq: max_seq_length, Seed: seed, Learning Rate: learning_rate, Optimizer: optimizer,
LR Schedule: lr_schedule, Report: steps_per_report, Eval: steps_per_eval, Save: save_every, Val Batches: val_batches,
Gradient accumulation: gradient_accumulation_steps, Sequence step size: seq_step_size, Test Batches: test_batches,
Gradient checkpointing: grad_checkpoint, Mask prompt: mask_prompt, Fuse: fuse, Prompt: prompt_feature,
Answer: answer_feature, Type: type_feature, Run folder name: run_name, Beta: beta,
Reference model path: reference_model_path, Group: group_size, Completion: max_completion_length, Temp: temperature,
Epsilon: epsilon, Top P: top_p, Top K: top_k, Min P: min_p, Epsilon high: epsilon_high, GRPO Loss: grpo_loss_type,
Importance: importance_sampling_level, Custom reward function names: reward_functions, Reward weights: reward_weights,
Reward functions Python file: reward_functions_file""")
"""The document's labels, in its order within each block."""
FORMER = pairs("""\
KL weight: beta, Reference model: reference_model_path, Reward functions: reward_functions,
Reward functions file: reward_functions_file, Default Reward Functions: reward_functions,
Use All Defaults: reward_functions, LoRA Settings: num_layers, QAT: quantization, Preference And Judge: beta,
Model or Hugging Face repo: model, Dataset path or local data folder: data, Learning rate and optimizer: learning_rate,
Evaluation and checkpoints: steps_per_report, Held-out prompts: valid_data, DR GRPO: grpo_loss_type,
Default Token Importance: importance_sampling_level""")
"""What else is searched for: our own former labels, headings, and those of the app itself."""


@pytest.fixture
def page(train_page: TrainPage) -> TrainPage:
    """The page with every setting at its default, and all of them on show."""
    train_page.draft.reset()
    train_page.density.choose("all")
    QApplication.processEvents()
    return train_page


def test_blocks_are_titled_as_documented() -> None:
    titles = ["Model & Data", "Fine-tune", "Training Settings", "Dataset Columns", "Output", "Preference And Judge"]
    assert list(SECTIONS.values()) == ["Algorithm", *titles, "GRPO Generation And Rewards"]


def test_labels_are_verbatim() -> None:
    settings = list(SETTINGS.values())
    for label, key in LABELS.items():
        assert SETTINGS[key].label.partition(" (")[0] == label, key
    for words, key in (LABELS | FORMER).items():
        for written in (words, words.lower()):
            assert matching_settings(written, settings)[0].key == key, words


def test_documented_order() -> None:
    for section, keys in DOCUMENTED.items():
        block = [about for about in SETTINGS.values() if about.section == section]
        assert [about.key for about in block if about.key in keys] == list(keys)
        for _, part in groupby(block, key=lambda about: about.group):
            own = list(part)
            last = max((i for i, about in enumerate(own) if about.key in keys), default=0)
            strangers = [about for about in own[:last] if about.key not in keys]
            assert all(about.when is not None and about.when[0] in keys for about in strangers), section
    documented = [key for section, keys in DOCUMENTED.items() if section != "algorithm" for key in keys]
    assert sorted(documented) == sorted(LABELS.values())


def test_the_file_has_the_order_of_the_form() -> None:
    lines = [line.partition(":")[0] for line in dump(parse({"model": "a/b", "data": "a/b"})).splitlines()]
    assert [line for line in lines if line in SETTINGS] == list(SETTINGS)


def test_order_on_the_page(page: TrainPage) -> None:
    sheet = page.form.widget()
    shown = {key: field for key, field in page.form.fields.items() if field.isVisible()}
    corners = {key: field.mapTo(sheet, field.rect().topLeft()) for key, field in shown.items()}
    places = {key: (corner.y(), corner.x()) for key, corner in corners.items()}
    for section, keys in DOCUMENTED.items():
        assert set(keys) <= set(places), section
        assert sorted(keys, key=lambda key: places[key]) == list(keys), section
    table = page.rewards.mapTo(sheet, page.rewards.rect().topLeft()).y()
    below = ("reward_functions", "reward_weights", "reward_functions_file")
    assert places["importance_sampling_level"][0] < table < min(places[key][0] for key in below)


def entries(page: TrainPage, key: str) -> list[str]:
    control = page.form.fields[key].control
    return [control.itemText(i) for i in range(control.count())]


def test_pickers_have_the_documented_entries(page: TrainPage) -> None:
    assert entries(page, "grpo_loss_type")[:3] == ["GRPO", "BNPO", "Dr. GRPO"]
    assert entries(page, "importance_sampling_level")[:3] == ["Default (Token)", "Token", "Sequence"]
    assert entries(page, "train_type") == ["LoRA", "DoRA", "Full"]
    assert entries(page, "quantization") == ["None", "4-bit", "6-bit", "8-bit", "MXFP4"]
    assert page.form.fields["reward_functions_file"].browse.text() == "Import…"
    labels = ["Accuracy", "Integer Answer", "Strict Format", "Soft Format", "XML Count"]
    assert [entry.label for entry in builtin_rewards()[:5]] == labels


def test_default_importance(page: TrainPage) -> None:
    field = page.form.fields["importance_sampling_level"]
    assert field.control.currentText() == "Default (Token)"
    for entry, value in (("Sequence", "sequence"), ("Token", "token"), ("Default (Token)", "token")):
        field.control.setCurrentText(entry)
        field.control.activated.emit(field.control.currentIndex())
        page.draft.set("seed", hash(entry) % 1000)
        assert field.control.currentText() == entry and page.draft.value("importance_sampling_level") == value


def test_idle_field_is_disabled(page: TrainPage) -> None:
    field, decides = page.form.fields["seq_step_size"], "efficient_long_context"
    assert field.isVisible() and not field.control.isEnabled()
    assert field._remedy is not None and field._remedy.isVisible()
    assert field._remedy.text() == f"Turn on {SETTINGS[decides].label}"
    field._remedy.click()
    assert page.draft.value(decides) is True and field.control.isEnabled() and not field._remedy.isVisible()
    page.draft.set(decides, False)
    assert not field.control.isEnabled() and field._remedy.isVisible()


def test_groups_by_keyboard(page: TrainPage) -> None:
    page.form.fields["batch_size"].control.setFocus()
    on, back = page.show_next_group, page.show_previous_group
    moves = [(on, "learning_rate"), (on, "steps_per_report"), (back, "learning_rate"), (back, "iters")]
    for move, key in (*moves, (back, "quantization")):
        move()
        assert QApplication.focusWidget() is page.form.fields[key].control


def test_the_documented_dataset_is_one_click_away(page: TrainPage) -> None:
    offer, service = page.default_dataset, page.session.service
    assert isinstance(service, ServiceByHand)
    assert offer.isVisible() and first_choices.DATASET in offer.text() and "2,000" in offer.text()
    offer.click()
    assert page.draft.value("data") == first_choices.DATASET and not offer.isVisible()
    asked = service.last("hub_files")
    assert asked.arguments == {"id": first_choices.DATASET, "repo_type": "dataset"}
    asked.answer({"total": 12_300_000})
    note = page.form.fields["data"]._note
    said = note.text().replace("\u202f", " ").replace("\u00a0", " ")
    assert said == "Not on this machine: 12.3 MB will be downloaded when the run starts."
    page.draft.set("data", "")
    assert offer.isVisible() and not note.isVisible()
