"""The reward table: order by mouse and keyboard, entries with arguments, files, means from the bench, where each is from."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QModelIndex, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest

from app import theme
from app.pages.train.reward_panel import LABEL, MEAN, NOT_FOUND, SCORES, SOURCE, USE, WEIGHT, RewardPanel
from app.state.draft import Draft
from app.widgets.reward_delegates import WeightEdit
from backend.rewards.catalogue import DEFAULT_REWARDS
from backend.utils.text import shorten

A, B, C, D, E = DEFAULT_REWARDS


@pytest.fixture
def draft(qapp) -> Draft:
    return Draft()


@pytest.fixture
def panel(qtbot, draft: Draft) -> RewardPanel:
    """The panel with the draft behind it, as the Train page joins them."""
    panel = RewardPanel()
    qtbot.addWidget(panel)

    def show(_key: str = "") -> None:
        panel.show_rewards(draft.rewards(), draft.value("reward_functions"), draft.value("reward_weights"))

    panel.picked.connect(lambda names, weights: draft.update({"reward_functions": names, "reward_weights": weights}))
    draft.changed.connect(show)
    show()
    panel.resize(900, 500)
    panel.show()
    return panel


def drag(panel: RewardPanel, row: int, to: int) -> None:
    """What Qt does with a row that is dropped before row `to`."""
    model = panel.model
    data = model.mimeData([model.index(row, LABEL)])
    taken = model.dropMimeData(data, Qt.DropAction.MoveAction, to, 0, QModelIndex())
    assert taken is False, "else the view would take the row out as well"


def click_cell(panel: RewardPanel, row: int, column: int) -> None:
    table = panel.table
    pos = table.visualRect(panel.model.index(row, column)).center()
    QTest.mouseClick(table.viewport(), Qt.MouseButton.LeftButton, pos=pos)


def test_dragging_reorders_functions_with_their_weights(panel: RewardPanel, draft: Draft, tmp_path: Path) -> None:
    draft.set("reward_weights", [1.0, 2.0, 3.0, 4.0, 5.0])
    drag(panel, 4, 1)
    assert draft.value("reward_functions") == [A, E, B, C, D]
    assert draft.value("reward_weights") == [1.0, 5.0, 2.0, 3.0, 4.0]
    drag(panel, 0, 5)
    assert draft.value("reward_functions") == [E, B, C, D, A]
    draft.update({"model": "m", "data": "d"})
    draft.save(tmp_path / "order.yaml")
    draft.reset()
    assert [row.entry.name for row in panel.model.ticked] == list(DEFAULT_REWARDS)
    draft.load(tmp_path / "order.yaml")
    assert [row.entry.name for row in panel.model.ticked] == [E, B, C, D, A]
    assert [row.weight for row in panel.model.ticked] == [5.0, 2.0, 3.0, 4.0, 1.0]


def test_only_ticked_rows_can_be_reordered(panel: RewardPanel, draft: Draft) -> None:
    draft.set("reward_functions", [A, C, E])
    movable = [
        bool(panel.model.flags(panel.model.index(row, LABEL)) & Qt.ItemFlag.ItemIsDragEnabled) for row in range(5)
    ]
    assert movable == [True, False, True, False, True]
    drag(panel, 4, 2)
    assert draft.value("reward_functions") == [A, E, C]
    drag(panel, 1, 0)
    assert draft.value("reward_functions") == [A, E, C], "a row without a tick goes nowhere"


def test_alt_with_an_arrow_key_moves_the_current_row(panel: RewardPanel, draft: Draft) -> None:
    table = panel.table
    table.setCurrentIndex(panel.model.index(0, LABEL))
    QTest.keyClick(table, Qt.Key.Key_Down, Qt.KeyboardModifier.AltModifier)
    assert draft.value("reward_functions") == [B, A, C, D, E]
    assert table.currentIndex().row() == 1, "the cursor goes with it"
    for _ in range(9):
        QTest.keyClick(table, Qt.Key.Key_Down, Qt.KeyboardModifier.AltModifier)
    assert draft.value("reward_functions") == [B, C, D, E, A]
    QTest.keyClick(table, Qt.Key.Key_Up, Qt.KeyboardModifier.AltModifier)
    assert draft.value("reward_functions") == [B, C, D, A, E]


def test_means_of_the_bench_are_shown_beside_the_weights(panel: RewardPanel, draft: Draft) -> None:
    assert panel.table.isColumnHidden(MEAN), "until there are some"
    panel.table.show_means({A: 0.8125, "says_so": 0.25})
    draft.set("reward_functions", [A, "keyword(word=so, name=says_so)"])
    assert not panel.table.isColumnHidden(MEAN)
    shown = {row.entry.name: panel.model.index(place, MEAN).data() for place, row in enumerate(panel.model.rows)}
    assert (shown[A], shown["keyword(word=so, name=says_so)"], shown[B]) == ("0.812", "0.250", "–")


def test_an_entry_with_arguments_ticks_the_row_of_its_function(
    panel: RewardPanel, draft: Draft, tmp_path: Path
) -> None:
    """It used to say that no such function was found."""
    (tmp_path / "mine.py").write_text('def brevity(completions, limit=9):\n    """Short is good."""\n')
    entry = f"{tmp_path / 'mine.py'}::brevity(limit=20)"
    draft.set("reward_functions", ["length_target(target=80)", entry, "nothing(x=1)"])
    rows = {row.entry.name: place for place, row in enumerate(panel.model.rows)}
    told = panel.model.index(rows[entry], SCORES).data()
    assert told == "Short is good." and panel.model.index(rows[entry], SOURCE).data() == "mine.py"
    assert panel.model.index(rows["length_target(target=80)"], LABEL).data() == "Length Target"
    assert [row.known for row in panel.model.ticked] == [True, True, False]
    assert any("nothing" in fault.sentence for fault in draft.problems() if fault.setting == "reward_functions")


def test_the_problem_of_a_file_without_reward_functions_says_what_to_do(draft: Draft, tmp_path: Path) -> None:
    file = tmp_path / "trl.py"
    file.write_text("def brevity(completions, **kwargs):\n    return []\n")
    draft.set("reward_functions_file", str(file))
    (sentence,) = [fault.sentence for fault in draft.problems() if fault.setting == "reward_functions_file"]
    whole = f"trl.py registers no reward function; name its functions among the reward functions instead, as {file}::brevity."
    assert sentence == shorten(whole)
    file.write_text("x = 1\n")
    (sentence,) = [fault.sentence for fault in draft.problems() if fault.setting == "reward_functions_file"]
    assert sentence == 'trl.py registers no reward function; put @register_reward_function("name") above each.'


# ticks, weights and colours


def test_space_ticks_the_current_row(panel: RewardPanel, draft: Draft) -> None:
    table = panel.table
    table.setCurrentIndex(table.model().index(1, LABEL))
    QTest.keyClick(table, Qt.Key.Key_Space)
    assert "r1_int_reward_func" not in draft.value("reward_functions")


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_a_weight_is_visible_while_it_is_typed(panel: RewardPanel, qapp, mode: str) -> None:
    """The style sheet left a spin box one pixel for its text."""
    theme.apply(qapp, mode)
    table = panel.table
    index = table.model().index(2, WEIGHT)
    table.setCurrentIndex(index)
    table.edit(index)
    edit = table.findChild(WeightEdit)
    assert edit.contentsRect().width() > edit.fontMetrics().horizontalAdvance("−100.125")
    QTest.keyClick(edit, Qt.Key.Key_Up)
    assert edit.text() == "1.1" and edit.selectedText() == "1.1"
    seen = edit.grab().toImage()
    colours = {seen.pixelColor(x, y).name() for x in range(seen.width()) for y in range(seen.height())}
    assert theme.palette().accent.name() in colours, "the selected text"
    theme.apply(qapp, "light")


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_an_unticked_check_box_is_visible(panel: RewardPanel, qapp, mode: str) -> None:
    theme.apply(qapp, mode)
    click_cell(panel, 1, USE)
    table = panel.table
    seen = table.viewport().grab(table.visualRect(table.model().index(1, USE))).toImage()
    edge = max(abs(seen.pixelColor(x, seen.height() // 2).lightness() - theme.palette().card.lightness()) for x in range(seen.width()))  # fmt: skip
    assert edge > 80
    theme.apply(qapp, "light")


def test_rows_of_the_reward_table_are_copied(panel: RewardPanel) -> None:
    table = panel.table
    table.selectRow(1)
    table.copy()
    line = QGuiApplication.clipboard().text().splitlines()[1].split("\t")
    assert line[:3] == ["yes", "Integer Answer", "r1_int_reward_func"]


def test_unticking_removes_the_weight_and_ticking_restores_it(panel: RewardPanel, draft: Draft) -> None:
    draft.set("reward_weights", [1.0, 2.0, 3.0, 4.0, 5.0])
    click_cell(panel, 1, USE)
    assert draft.value("reward_weights") == [1.0, 3.0, 4.0, 5.0]
    click_cell(panel, 1, USE)
    assert draft.value("reward_weights") == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_an_unknown_name_keeps_a_row_that_says_so(panel: RewardPanel, draft: Draft) -> None:
    draft.set("reward_functions", ["r1_int_reward_func", "mine"])
    assert panel.model.rows[-1].known is False
    assert panel.model.index(5, SCORES).data() == NOT_FOUND


def test_a_ticked_reward_has_the_colour_of_its_index(panel: RewardPanel) -> None:
    click_cell(panel, 0, USE)
    picture = panel.model.index(1, LABEL).data(Qt.ItemDataRole.DecorationRole).toImage()
    assert picture.pixelColor(10, 10).rgb() == theme.reward_colour(0).rgb()
