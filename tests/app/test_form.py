"""The Train page: every setting can be filled in through its widget and comes back from the file; rewards are two views
of the same values; problems stand where they are mended.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QAbstractButton, QApplication, QLabel, QLineEdit, QPlainTextEdit

from app.pages.train.form import ESSENTIAL
from app.pages.train.reward_panel import LABEL, USE, WEIGHT
from app.pages.train.tools_field import EXACT, FROM_SOURCE
from app.pages.train.train_page import TrainPage
from app.state.draft import Draft
from app.state.memory import MemoryParts
from app.state.prefs import Prefs
from app.state.run_summary import details
from app.state.session import Session
from app.widgets.basic import controls
from app.widgets.basic.controls import NumberEdit
from app.widgets.basic.tables import toggle_tick
from app.widgets.form import fields
from app.widgets.form.fields import AdapterField
from app.widgets.form.setting_search import KEY, SettingSearch
from app.widgets.reward_delegates import weight_of
from app.window import Window
from backend.config.config import SETTINGS, load, parse
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.runs.run_folder import RunFolder
from backend.trainer.memory.estimate import PARTS, estimate_run
from backend.trainer.memory.model_shape import shape_of
from backend.utils import places
from backend.utils.errors import ConfigProblem
from backend.utils.hub_cache import local_folder
from backend.utils.machine import machine_bytes
from backend.utils.places import demo_config
from tests.app.test_reward_page import click_cell
from tests.support.random_settings import filled_form
from tests.support.trainer_by_hand import add_checkpoints
from tests.support.windows import ServiceByHand, table_texts

GOLDEN = Path(__file__).parents[1] / "golden"
NOT_TYPED = {"reward_functions_file", "map_function", "output_schema", "hosts", "parallelism"}
NOT_TYPED |= {"tools_file", "tools", "environment", "mcp_servers", "teacher_model"}
"""Those that need a file or another mode, and those with whose other values few settings go together."""
FILLED = filled_form(*NOT_TYPED)


@pytest.fixture
def page(qtbot, train_page: TrainPage) -> Iterator[TrainPage]:
    """The page with the essentials, every setting at its default."""
    train_page.draft.reset()
    train_page.density.choose("essentials")
    with qtbot.waitActive(train_page):
        train_page.activateWindow()
    yield train_page
    train_page.session.close_run()


def fill(field: fields.Field, value: object) -> None:
    """Operate the field's control as the user would."""
    control = field.control
    if isinstance(control, controls.ComboBox):
        control.setCurrentIndex(control.findData(value))
        control.activated.emit(control.currentIndex())
    elif isinstance(control, controls.Switch):
        if control.isChecked() != value:
            control.click()
    elif isinstance(control, controls.ProseEdit):
        control.setPlainText(field.write(value))
    else:
        text = field.text_of(value)
        control.selectAll()
        control.insert(text[:-1])  # all but the last is pasted: each key costs milliseconds
        QTest.keyClicks(control, text[-1:])
        if not text:
            QTest.keyClick(control, Qt.Key.Key_Delete)


def fix_problems(draft: Draft) -> None:
    draft.update({"model": "someone/model", "data": "someone/data"})


def plain_text(text: str) -> str:
    """With ordinary spaces for those that do not break."""
    return text.replace("\u00a0", " ")


def rows(page: TrainPage) -> list[tuple[str, bool, float | None]]:
    return [(row.entry.name, row.ticked, row.weight) for row in page.rewards.model.rows]


def test_every_setting_survives_save_and_load(page: TrainPage, tmp_path: Path, qtbot):
    assert set(page.form.fields) == set(SETTINGS), "every setting has its field"
    for key in sorted(FILLED, key=lambda key: SETTINGS[key].when is not None):  # what enables others comes first
        fill(page.form.fields[key], FILLED[key])
    assert page.draft.problems() == []
    assert page.draft.config() == parse(FILLED)
    page.draft.save(tmp_path / "typed.yaml")
    fresh = Window(Session(Prefs(tmp_path / "other")))
    qtbot.addWidget(fresh)
    fresh.files.open_path(tmp_path / "typed.yaml")
    assert fresh.session.draft.config() == parse(FILLED)
    train = fresh.pages["train"]
    assert "epsilon_high" not in train.form.fields, "the first paint waits for fields that it does not show"
    train.reveal("epsilon_high")
    qtbot.waitUntil(lambda: train.density.key == "all")
    shown = {key: field.value() for key, field in train.form.fields.items()}
    assert parse(shown) == parse(FILLED), "the widgets show what was loaded"
    assert not fresh.isWindowModified()


def test_mlx_lm_lora_config_opens(page: TrainPage, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    function = "@register_reward_function('{0}')\ndef {0}(prompts, completions, answer, types=None):\n    return []\n"
    (tmp_path / "my_rewards.py").write_text("".join(map(function.format, ("exact_match", "by_type", "concise"))))
    page.session.load_config(GOLDEN / "mlx_lm_lora_grpo.yaml")
    page._show_problems()
    assert page.draft.problems() == []
    ticked = [(row.entry.name, row.weight) for row in page.rewards.model.ticked]
    assert ticked == [("exact_match", 2.0), ("by_type", 1.5), ("concise", 0.5)]
    fields = page.form.fields
    assert fields["data"].control.text() == "mlx-community/Dolci-Think-RL-7B-2k"
    assert fields["importance_sampling_level"].value() == "sequence"
    banner = page.translated_file
    said = banner.sentence.text()
    assert said.startswith("mlx_lm_lora_grpo.yaml is a file for mlx-lm-lora. Ignored: train (every run here trains).")
    assert banner.isVisible() and banner.show_button.isVisible(), "the defaults are behind the button"
    assert page.draft.value("optimizer") == "adam" and "mlx-lm-lora's defaults:" in banner.translated.text()
    banner.defaults_button.click()
    assert page.draft.value("optimizer") == "adamw"
    assert banner.sentence.text().endswith("Settings that it leaves out have GRPO Studio's defaults.")
    assert banner.defaults_button.text() == "Use mlx-lm-lora's defaults"
    banner.close_button.click()
    page._show_values()
    assert not banner.isVisible(), "it stays closed"


def test_problem_below_its_field(page: TrainPage, qtbot):
    fix_problems(page.draft)
    field = page.form.fields["temperature"]
    fill(field, 0)
    qtbot.waitUntil(lambda: field._problem is not None and field._problem.isVisible())
    assert field._problem.text() == "Temp must be above 0, not 0."
    fill(field, 1)
    qtbot.waitUntil(lambda: not field._problem.isVisible())
    data = page.form.fields["data"]
    for name, is_problem in (("/no/such.csv", True), (str(places.demo_folder("data")), False), ("/no/such.csv", True)):
        page.draft.set("data", name)
        qtbot.waitUntil(lambda shown=is_problem: bool(data._problem and data._problem.isVisible()) is shown)
        assert page.dataset_line.isHidden() is is_problem, "the same problem was shown twice"


def test_lora_settings_hidden_under_full(page: TrainPage, qtbot):
    page.density.choose("all")
    rank = page.form.fields["rank"]
    assert not rank.isHidden()
    fill(page.form.fields["train_type"], "full")
    assert rank.isHidden()
    page.density.choose("essentials")
    assert rank.isVisible() and not rank.control.isEnabled(), "the essentials keep their places"
    with qtbot.waitSignal(page.session.message) as signal:
        page.reveal("rank")
    assert signal.args == ["Rank applies only with another choice of Fine-tune."]
    fill(page.form.fields["train_type"], "lora")
    assert rank.control.isEnabled()


FIVE = {
    "lora": {"model": "a/b", "data": "c/d"},
    "full": {"model": "a/b", "data": "c/d", "train_type": "full", "lr_schedule": "cosine"},
    "dapo": {"model": "a/b", "data": "c/d", "grpo_loss_type": "dapo", "epsilon_high": 0.28, "dynamic_sampling": True},
    "many": FILLED,
}


def test_a_mode_hides_what_it_has_no_use_for(page: TrainPage, qtbot):
    """Both densities, headings and cards too; switching back brings the values back."""
    fields, draft = page.form.fields, page.draft
    draft.update({"group_size": 6, "beta": 0.3, "num_iterations": 2, "reward_functions": ["no_such_function"]})
    fill(fields["train_mode"], "grpo")
    assert draft.value("reward_functions") == ["no_such_function"], "the mode that it has already"
    for density in ("essentials", "all"):
        page.density.choose(density)
        for mode, hidden in {"sft": {"group_size", "beta", "rewards"}, "distill": {"beta"}, "grpo": set()}.items():
            draft.set("train_mode", mode)
            shown = {"group_size": fields["group_size"], "beta": fields["beta"], "rewards": page.rewards}
            assert {key for key, part in shown.items() if not part.isVisible()} == hidden, (density, mode)
            titles = [title.text() for title in page.form.findChildren(QLabel) if title.isVisible()]
            assert ("GRPO Generation And Rewards" in titles) == (mode != "sft")
            assert ("QAT" in titles) == ("Advantages" in titles) == (density == "all" and mode == "grpo")
            assert ("2 updates from" in plain_text(page.launch.details.text())) == (mode != "sft")
            assert fields["num_iterations"].isVisible() == (density == "all" and mode != "sft")
            of_rewards = [problem for problem in draft.problems() if problem.setting == "reward_functions"]
            assert bool(of_rewards) == (mode == "grpo")
            assert bool(page.rewards.model.ticked) == (mode == "grpo"), "beside GRPO they are optional"
    assert [draft.value(key) for key in ("group_size", "beta")] == [6, 0.3]
    draft.set("train_mode", "sft")
    with qtbot.waitSignal(page.session.message) as said:
        page.reveal("beta")
    assert said.args == ["Beta (KL weight) applies only with another choice of Mode."]


def test_a_loss_is_best_at_its_lowest(page: TrainPage, qtbot):
    field = page.form.fields["best_is_lowest"]
    page.density.choose("all")
    assert field.isVisible()
    page.draft.update({"train_mode": "sft", "best_is_lowest": True})
    assert field.isHidden() and "best_is_lowest" not in page.chips.chips
    with qtbot.waitSignal(page.session.message) as told:
        page.reveal("best_is_lowest")
    assert told.args == ["Lower is better applies only with another choice of Best metric."]
    page.draft.set("best_metric", "eval/loss")
    assert field.isVisible()


def test_essentials_keep_their_places(qtbot, window: Window, session: Session, tmp_path: Path):
    """Thirteen fields and the rewards, on one screen without scrolling, in the same places for every config."""
    session.restore()
    window.show_page("train")
    qtbot.show(window, 1440, 900)
    page, draft = window.pages["train"], session.draft
    trl = tmp_path / "trl.yaml"
    trl.write_text("model_name_or_path: a/b\ndataset_name: c/d\nnum_generations: 8\nuse_peft: true\nlora_r: 64\n")

    def places() -> dict[str, tuple[int, int]]:
        QTest.qWait(20)
        assert page.form.verticalScrollBar().maximum() == 0, "all is visible without scrolling"
        shown = {key: field for key, field in page.form.fields.items() if field.isVisible()}
        assert shown.keys() == ESSENTIAL - {"teacher_model"} and len(shown) == 13 and page.rewards.table.isVisible()
        assert not any(field.hint.isVisible() for field in shown.values()), "a caption would be cut"
        parts = shown | {"rewards": page.rewards, "run": window.toolbar.widgetForAction(window.menus["run"])}
        return {
            key: (part.mapTo(window, QPoint()).x(), part.mapTo(window, QPoint()).y()) for key, part in parts.items()
        }

    assert draft.is_demo and page.banner.isVisible()
    expected = places()
    for name, values in FIVE.items():
        draft.start_from({key: value for key, value in values.items() if not key.startswith("reward")}, name)
        assert places() == expected, name
    draft.reset()
    across = {key: place[0] for key, place in expected.items()}
    assert {key: place[0] for key, place in places().items()} == across, "problems make no column wider"
    session.load_config(trl)
    assert page.translated_file.isVisible()
    qtbot.waitUntil(lambda: places() == expected)


def test_a_small_window_shows_the_essentials_whole(qtbot, window: Window, session: Session):
    """Nothing lies beside the form, which does not scroll sideways, however the window came to its width."""
    session.restore()
    window.show_page("train")
    qtbot.show(window, 1440, 900)
    page = window.pages["train"]
    form, batch = page.form, page.form.fields["batch_size"].control
    page.build_all()
    page.density.choose("all")
    window.resize(1024, 700)
    qtbot.waitUntil(lambda: form.viewport().width() < 600)
    assert not form.essentials.isAncestorOf(batch), "it stays among all settings"
    page.density.choose("essentials")
    for width in (1024, 1440, 1100, 1240, 880):
        window.resize(width, 700)
        qtbot.waitUntil(lambda: form.page.width() == form.viewport().width())
        room = batch.width() - batch.textMargins().right()
        assert room > 2 * batch.fontMetrics().horizontalAdvance("64"), f"the unit covers the number at {width}"


def test_every_field_says_what_it_is_whole(qtbot, window: Window, session: Session):
    window.show_page("train")
    qtbot.show(window, 1280, 800)
    page = window.pages["train"]
    page.build_all()
    page.density.choose("all")
    for changes in ({}, {"use_speculative_decoding": True, "warmup_steps": 2}, {"train_mode": "distill"}):
        session.draft.update(changes)
        shown = [field for field in page.form.fields.values() if field.isVisible()]
        assert len(shown) > 110
        qtbot.waitUntil(lambda: page.form.page.width() == page.form.viewport().width())
        for field in shown:
            needed = field.hint.fontMetrics().horizontalAdvance(field.hint.text())
            assert needed <= field.hint.width(), f"the hint of {field.setting.key} is cut"
            if isinstance(field.control, QLineEdit | QPlainTextEdit) and field.value() in ("", None, [], {}):
                assert field.control.placeholderText(), f"{field.setting.key} does not say what empty means"


def test_changed_settings_are_chips(page: TrainPage):
    draft, chips = page.draft, page.chips
    draft.reset()
    assert chips.count.text() == "Everything else is at its default." and not chips.chips
    draft.update({"epsilon_high": 0.28, "weight_decay": 0.1, "iters": 5, "lora_keys": ["q", "v"]})
    assert chips.count.text() == "3 changed" and list(chips.chips) == ["lora_keys", "weight_decay", "epsilon_high"]
    QApplication.processEvents()  # the layout shows them
    chips.chips["weight_decay"].text.setFocus()
    QTest.keyClick(chips.chips["weight_decay"].text, Qt.Key.Key_Delete)
    assert draft.value("weight_decay") == SETTINGS["weight_decay"].default and "weight_decay" not in chips.chips
    assert QApplication.focusWidget() is chips.chips["epsilon_high"].text, "the focus goes to the next"
    QTest.mouseClick(chips.chips["lora_keys"].remove, Qt.MouseButton.LeftButton)
    assert list(chips.chips) == ["epsilon_high"]
    QTest.mouseClick(chips.chips["epsilon_high"].text, Qt.MouseButton.LeftButton)
    field = page.form.fields["epsilon_high"]
    assert page.density.key == "all" and field.isVisible() and QApplication.focusWidget() is field.control
    assert page.session.prefs.train_density == "essentials", "a jump is no choice"
    page.search.chosen.emit("iters")
    assert QApplication.focusWidget() is page.form.fields["iters"].control and page.density.key == "all"
    page.density.choose("all")
    assert page.session.prefs.train_density == "all"


def test_problems_of_a_file_are_mended_in_their_panel(page: TrainPage, tmp_path: Path, qtbot):
    file, panel = tmp_path / "bad.yaml", page.file_problems
    file.write_text("model: a/b\nzzz: 2\niters: many\nlerning_rate: 1e-4\n")
    page.session.load_config(file)
    qtbot.waitUntil(panel.isVisible)
    assert panel.title.text() == "Problems in bad.yaml" and panel.sentence.text().startswith("2 settings could not")
    assert len(page.draft.problems()) == 2 and page.launch._problem_rows.count() == 1, "what the file has is told once"
    links = {button.accessibleName() or button.text(): button for button in panel.findChildren(QAbstractButton)}
    links["Go to Iterations"].click()
    assert QApplication.focusWidget() is page.form.fields["iters"].control
    links["Use learning_rate for lerning_rate"].click()
    assert page.draft.value("learning_rate") == "1e-4" and panel.sentence.text().startswith("1 setting could not")
    panel.close_button.click()
    qtbot.waitUntil(panel.isHidden)
    file.write_text("model: a/b\nzzz: 2\nlerning_rate: 1e-4\nwarmup_stps: 2\n" + 20 * "\n# more\n" + "gruop_sze: 4\n")
    page.session.load_config(file)
    for meant in ("learning_rate", "warmup_steps"):
        use = next(each for each in panel._links if each.text() == f"Use {meant}")
        QTest.mouseClick(use, Qt.MouseButton.LeftButton)
        qtbot.waitUntil(lambda: QApplication.focusWidget() in panel._links)
        assert page.launch.verticalScrollBar().value() == 0, "what is left to mend stays in view"
    file.write_text("model: [")
    page.session.load_config(file)
    qtbot.waitUntil(lambda: panel.title.text() == "bad.yaml was not opened")
    assert not panel.open_button.isHidden()
    page.session.load_config(tmp_path / "gone.yaml")
    qtbot.waitUntil(panel.open_button.isHidden)


def test_choice_that_is_always_refused_is_listed_where_a_file_has_it(page: TrainPage):
    menu = page.form.fields["parallelism"].control
    assert menu.findData("pipeline") < 0 <= menu.findData("tensor")
    page.draft.set("parallelism", "pipeline")
    assert menu.currentData() == "pipeline"


def test_unusual_value_is_a_warning(page: TrainPage, qtbot):
    fix_problems(page.draft)
    fill(page.form.fields["iters"], 10**7)
    fill(page.form.fields["learning_rate"], 5)
    field = page.form.fields["learning_rate"]
    qtbot.waitUntil(lambda: field._problem is not None and field._problem.isVisible())
    assert field._problem.text() == "This is unusually large: 1e-6 to 1e-4 is usual."
    assert field._problem.property("role") == "muted" and not field.control.property("problem")
    assert page.launch._warnings.isVisible() and page.launch._warning_rows.count() == 2
    fill(page.form.fields["iters"], 100)
    fill(field, 1e-5)
    qtbot.waitUntil(lambda: not page.launch._warnings.isVisible())
    assert not field._problem.isVisible()


def test_weights_are_edited_in_the_table(page: TrainPage, tmp_path: Path, qtbot):
    names = '["r1_accuracy_reward_func", "r1_count_xml"]'
    (tmp_path / "trl.yaml").write_text(f"reward_functions: {names}\nreward_weights: '[2.0, 0.5]'\n")
    page.session.load_config(tmp_path / "trl.yaml")
    assert [row.weight for row in page.rewards.model.ticked] == [2.0, 0.5]
    assert page.rewards.model.index(0, WEIGHT).data() == "2"
    click_cell(page.rewards, 0, WEIGHT)
    box = page.rewards.table.findChild(NumberEdit)
    box.selectAll()
    QTest.keyClicks(box, "2.5")
    QTest.keyClick(box, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: page.draft.value("reward_weights") == [2.5, 0.5])
    assert page.form.fields["reward_weights"].control.text() == "2.5, 0.5"


def test_a_function_that_is_not_there_keeps_its_row(page: TrainPage):
    page.draft.set("reward_functions", ["gone", "r1_count_xml"])
    row = next(place for place, row in enumerate(page.rewards.model.rows) if row.entry.name == "gone")
    before = [name for name, *_ in rows(page)]
    click_cell(page.rewards, row, USE)
    assert page.draft.value("reward_functions") == ["r1_count_xml"] and [name for name, *_ in rows(page)] == before
    click_cell(page.rewards, row, USE)
    assert "gone" in page.draft.value("reward_functions")
    click_cell(page.rewards, row, USE)
    page.draft.reset()
    assert "gone" not in [name for name, *_ in rows(page)], "another form"


@pytest.mark.parametrize(
    ("typed", "weight"), [("0,5", 0.5), ("1e-3", 0.001), ("−2", -2.0), ("1,500", 1500.0), ("inf", None), ("2 x", None)]
)
def test_a_weight_is_what_was_typed_or_nothing(typed: str, weight: float | None):
    assert weight_of(typed) == weight


@pytest.fixture
def search(qtbot) -> SettingSearch:
    return qtbot.show(SettingSearch(list(SETTINGS.values())))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("warm-up st", "lr_warmup_init"),
        ("TOP_K", "top_k"),
        ("mask-prompt", "mask_prompt"),
        ("--grad-checkpoint", "grad_checkpoint"),
        ("layers pipeline", None),
        ("num_generations", "group_size"),
        ("load_in_4bits", "quantization"),
        ("GSPO", "importance_sampling_level"),
        ("rate final", "lr_final"),
        ("randomness of", "temperature"),
        ("", None),
    ],
)
def test_setting_search(search: SettingSearch, words: str, key: str | None):
    search.setText(words)
    assert matches(search)[:1] == ([key] if key or words else []), "an entry without a key says that there is none"
    QTest.keyClick(search, Qt.Key.Key_Return)


def matches(search: SettingSearch) -> list[str]:
    model = search.completer().model()
    return [model.index(row, 0).data(KEY) for row in range(model.rowCount())]


@pytest.mark.parametrize("way", ["return", "arrows", "click"])
def test_a_match_is_chosen(search: SettingSearch, qtbot, way: str):
    QTest.keyClicks(search, "batch")
    popup = search.completer().popup()
    keys = matches(search)
    assert popup.isVisible() and len(keys) > 2
    chosen = keys[0] if way == "return" else keys[2]
    with qtbot.waitSignal(search.chosen) as signal:
        if way == "click":
            row = popup.visualRect(popup.model().index(2, 0))
            QTest.mouseClick(popup.viewport(), Qt.MouseButton.LeftButton, pos=row.center())
        else:
            for key in [Qt.Key.Key_Down] * (3 if way == "arrows" else 0) + [Qt.Key.Key_Return]:
                QTest.keyClick(popup, key)
                assert way == "return" or key != Qt.Key.Key_Down or search.text() == "batch"
    assert signal.args == [chosen]
    qtbot.waitUntil(lambda: search.text() == "" and popup.isHidden())


def test_no_ticks_mean_the_defaults(page: TrainPage):
    fix_problems(page.draft)
    for row in range(5):
        assert not page.rewards.none_ticked.isVisible()
        click_cell(page.rewards, row, USE)
    assert page.draft.value("reward_functions") == [] and page.form.fields["reward_functions"].control.text() == ""
    assert page.draft.problems() == [] and page.draft.config().reward_functions == list(DEFAULT_REWARDS)
    assert page.rewards.none_ticked.isVisible() and "the five defaults score" in page.rewards.none_ticked.text()
    assert page.rewards.count.text() == "the 5 defaults used"
    assert "Scored by 5 reward functions" in plain_text(page.launch.details.text())
    page.rewards.use_defaults.click()
    assert page.draft.value("reward_functions") == list(DEFAULT_REWARDS)
    assert not page.rewards.none_ticked.isVisible()


def test_chosen_file_comes_first_and_ticked(page: TrainPage, tmp_path: Path):
    for name, decorator in (("first", "@register_reward_function('first')\n"), ("second", "")):  # second: as for TRL
        text = f"{decorator}def {name}(completions, **columns):\n    'Scores all.'\n"
        (tmp_path / f"{name}.py").write_text(text)
    page.draft.update({"reward_functions": ["r1_count_xml"], "reward_weights": [0.5]})
    page.form.fields["reward_functions_file"].take(str(tmp_path / "first.py"))
    assert rows(page)[0] == ("first", True, 1.0)
    assert page.draft.value("reward_functions") == ["first", "r1_count_xml"]
    assert page.draft.value("reward_weights") == [1.0, 0.5]
    page.session.use_path("reward_functions_file", tmp_path / "second.py")
    assert page.density.key == "essentials" and page.rewards.table.hasFocus(), "its functions stand in the table"
    QTest.mouseClick(page.chips.chips["reward_functions_file"].text, Qt.MouseButton.LeftButton)
    assert QApplication.focusWidget() is page.form.fields["reward_functions_file"].control
    assert page.draft.value("reward_functions") == ["second", "r1_count_xml"], "what the earlier file had is gone"
    assert not [fault for fault in page.draft.problems() if fault.setting.startswith("reward")]
    broken = tmp_path / "broken.py"
    broken.write_text("def (")
    page.form.fields["reward_functions_file"].take(str(broken))
    assert page.draft.value("reward_functions_file") == str(broken) and page.draft.problems()


def choose_reward(page: TrainPage, name: str) -> None:
    row = next(i for i, row in enumerate(page.rewards.model.rows) if row.entry.name == name)
    page.rewards.table.setCurrentIndex(page.rewards.model.index(row, LABEL))


def test_reward_arguments(page: TrainPage):
    page.draft.update({"reward_functions": ["r1_count_xml"], "reward_weights": [0.5]})
    page.rewards.show_all()
    choose_reward(page, "cosine_scaled_reward")
    assert page.rewards.arguments.minimumSizeHint().width() < 400, "it fits the narrowest window"
    choose_reward(page, "keyword")
    fields = page.rewards.arguments.fields
    assert page.rewards.arguments.minimumSizeHint().width() < 400, "it fits the narrowest window"
    assert list(fields) == ["word", "case"] and fields["word"].placeholderText() == "required"
    assert fields["case"].currentText() == "Default (no)"
    fields["word"].setFocus()
    QTest.keyClicks(fields["word"], "four")
    QTest.keyClick(fields["word"], Qt.Key.Key_Return)
    assert page.draft.value("reward_functions") == ["r1_count_xml", 'keyword(word="four")']
    assert page.draft.value("reward_weights") == [0.5, 1.0]
    assert page.rewards.arguments.fields is fields, "the next field has the focus already, and must keep it"
    fields["case"].setCurrentIndex(fields["case"].findData("true"))
    fields["case"].activated.emit(fields["case"].currentIndex())
    assert page.draft.value("reward_functions")[1] == 'keyword(word="four", case=True)'
    fields["word"].clear()
    fields["word"].editingFinished.emit()
    assert page.draft.value("reward_functions")[1] == "keyword(case=True)"
    assert any("word" in fault.sentence for fault in page.draft.problems())


def test_memory_in_the_plan_and_bar(page: TrainPage, qtbot, monkeypatch):
    fix_problems(page.draft)
    parts = (("Weights", "", 4e9), ("KV cache", "Keys and values.", 2.8e9), ("Logits", "", 3e9), ("Adapters", "", 1e6))
    needed = MemoryParts(parts, 16e9, "Shorter completions need less.")
    monkeypatch.setattr("app.state.run_starter.memory_parts_of", lambda *_, **__: needed)
    page._show_problems()
    assert plain_text(page.launch.summary.text()).endswith("1,000 steps, 9.8 GB.")
    bar = page.launch.memory
    assert bar.isVisible()
    assert plain_text(bar.sentence.text()) == "Needs about 9.8 GB of 16.0 GB."
    described = plain_text(bar.accessibleDescription())
    assert "Weights 4.0 GB" in described and "Other 1 MB" in described
    assert not bar.advice.isVisible()
    needed = replace(needed, limit=8e9)
    page._show_problems()
    assert plain_text(bar.sentence.text()) == "Needs about 9.8 GB, and this machine has only 8.0 GB to give."
    assert bar.advice.isVisible()
    bar.grab()


def test_too_large_run_needs_confirmation(page: TrainPage, monkeypatch, started):
    fix_problems(page.draft)
    needed = MemoryParts((("Weights", "", 10e9),), 4e9)
    monkeypatch.setattr("app.state.run_starter.memory_parts_of", lambda *_, **__: needed)
    page.session.starter.start()
    assert not started and page.session.messages.current is not None
    said = plain_text(page.session.messages.current.sentence)
    assert said == "Not started. Needs about 10.0 GB, and this machine has only 4.0 GB to give."
    monkeypatch.setattr(page.session.starter, "confirm_over_memory", lambda memory_parts: True)
    page.session.starter.start()
    assert len(started) == 1


def test_every_part_of_an_estimate_has_a_label() -> None:
    demo = load(demo_config()).model_dump()
    folder = local_folder(demo["model"])
    shape = shape_of(folder)
    reported = set()
    long = demo | {"beta": 0.1, "max_completion_length": 2000, "max_seq_length": 4096}
    full, lora = {"train_type": "full", "gradient_accumulation_steps": 8}, {"train_type": "lora", "num_layers": -1}
    for changes in (full, lora, lora | {"rollout_quantization": "8"}):
        result = estimate_run(parse(long | changes), shape, machine_bytes(), prompt=400)
        reported |= {*result.rollout.sizes, *result.training.sizes}
    assert {"prompts", "adapters", "rollout weights", "KV cache", "logits"} <= reported, (
        "the settings above no longer reach these parts"
    )
    assert reported <= set(PARTS)


@pytest.fixture
def run(apart: Path) -> RunFolder:
    run = RunFolder(places.runs_folder() / "first")
    add_checkpoints(run, {2: 0.9, 4: 0.1})
    run.adapters.mkdir()
    (run.adapters / "adapters.safetensors").write_bytes(b"x")
    lora = {"rank": 5, "scale": 7.0, "keys": ["self_attn.q_proj"]}
    about = {"fine_tune_type": "dora", "num_layers": 3, "model": "someone/base", "lora_parameters": lora}
    (run.adapters / "adapter_config.json").write_text(json.dumps(about))
    run.config.write_text("model: someone/base\n")
    return run


def test_run_as_adapter(page: TrainPage, run: RunFolder) -> None:
    session = page.session
    session.draft.update({"model": "", "rank": 8})
    field = page.form.fields["adapter"]
    menu = field.browse.menu()
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


def test_peft_adapter(page: TrainPage, tmp_path: Path, monkeypatch) -> None:
    session = page.session
    (folder := tmp_path / "checkpoint-200").mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    session.draft.update({"model": "someone/base"})
    field = page.form.fields["adapter"]
    assert isinstance(field, AdapterField) and field.import_button.isHidden()
    asked: dict[str, Any] = {}
    ask = lambda question, on_answer, **how: asked.update(how, question=question, answer=on_answer)  # noqa: E731
    monkeypatch.setattr(session.service, "ask", ask)
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
    return field._note.text() if not field._note.isHidden() else ""


TOOLS = """
def add(first: int, second: int = 0) -> int: ...
def say(text: str): ...
def _private(): ...
raise RuntimeError("the window must not run it")
"""
GAME = """
class Base:
    def move(self, to: str): "Move on."
class Game(Base):
    def reset(self, **row): ...
"""


def test_functions_are_listed_by_name_and_once_allowed_all_tools_as_the_model_reads_them(
    page: TrainPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page.session, "service", service := ServiceByHand())
    page.show_density("all")
    field, draft = page.form.fields["tools"], page.draft
    assert field.status.text().startswith("None.") and field.control.isHidden() and field.load.isHidden()
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "game.py").write_text(GAME)
    draft.update({"tools_file": str(tmp_path / "tools.py"), "environment": f"{tmp_path / 'game.py'}::Game"})
    field.refresh()
    assert table_texts(field.model) == [["None", name, "", "", "tools.py"] for name in ("add", "say")]
    assert not service.asked and field.schema.isHidden() and field.status.text() == FROM_SOURCE
    toggle_tick(field.model, field.model.index(0, 0))
    assert draft.value("tools") == ["say"]
    toggle_tick(field.model, field.model.index(1, 0))
    assert draft.value("tools") == ["say"], "the last one stays"
    toggle_tick(field.model, field.model.index(0, 0))
    assert draft.value("tools") == []
    monkeypatch.setattr(page.session.consent, "ask", lambda requests: False)
    field.load.click()
    assert not service.asked
    monkeypatch.setattr(page.session.consent, "ask", lambda requests: True)
    field.load.click()
    about = {"name": "add", "description": "Add.", "parameters": {"properties": {"first": {"type": "integer"}}}}
    served = {"name": "now", "description": "", "parameters": {}}
    move = {"name": "move", "description": "Move on.", "parameters": {"properties": {"to": {"type": "string"}}}}
    add, now, move = ({"type": "function", "function": each} for each in (about, served, move))
    service.last("tools").answer({"shared": [add, now], "by_environment": {"": [move]}})
    assert field.status.text() == EXACT and "integer, opt" in field.schema.text()
    assert table_texts(field.model) == [
        ["None", "add", "Add.", "first", "tools.py"],
        ["None", "say", "", "", "tools.py"],
        ["None", "move", "Move on.", "to", "Game"],
        ["None", "now", "", "none", "MCP server"],
    ]
    draft.set("tools", ["sing"])
    assert table_texts(field.model)[-1][2] == "The tools file has no function of this name."
    (tmp_path / "tools.py").write_text("def add(:")
    field.refresh()
    assert field.status.text() == "tools.py has a syntax error on line 1: invalid syntax."
    (tmp_path / "tools.py").write_text(TOOLS)
    monkeypatch.setattr(fields, "open_file", lambda *_: tmp_path / "game.py")
    page.form.fields["environment"].browse.click()
    assert draft.value("environment") == f"{tmp_path / 'game.py'}::Game", "the class with a reset"
    (tmp_path / "game.py").write_text(f"{GAME}class Other:\n    def reset(self): ...\n")
    page.form.fields["environment"].browse.click()
    assert draft.value("environment") == {name.lower(): f"{tmp_path / 'game.py'}::{name}" for name in ("Game", "Other")}
    fix_problems(draft)
    assert "May call tools of tools.py, Game, Other" in details(draft.sound_config())
