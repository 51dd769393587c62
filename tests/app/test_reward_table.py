"""The reward table: order by mouse and keyboard, entries with arguments, files, means from the bench, where each is
from."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QModelIndex, Qt
from PySide6.QtTest import QTest

from app.pages.train.reward_panel import LABEL, SCORES, SOURCE, USE, RewardPanel
from app.state.consent import Consent
from app.state.draft import Draft
from app.state.reward_bench import RewardBench
from backend.rewards.catalogue import DEFAULT_REWARDS
from tests.support.windows import SilentService

A, B, C, D, E = DEFAULT_REWARDS


@pytest.fixture
def draft(qapp) -> Draft:
    return Draft()


@pytest.fixture
def panel(qtbot, draft: Draft, tmp_path: Path) -> RewardPanel:
    """The panel with the draft behind it, as the Train page joins them."""
    bench = RewardBench(draft, SilentService(), Consent(tmp_path / "trusted.json"))  # pyright: ignore
    panel = RewardPanel(bench)
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


def test_drag_reorders(panel: RewardPanel, draft: Draft) -> None:
    draft.set("reward_weights", [1.0, 2.0, 3.0, 4.0, 5.0])
    drag(panel, 4, 1)
    assert draft.value("reward_functions") == [A, E, B, C, D]
    assert draft.value("reward_weights") == [1.0, 5.0, 2.0, 3.0, 4.0]
    drag(panel, 0, 5)
    assert draft.value("reward_functions") == [E, B, C, D, A]


def test_alt_arrow_moves_a_row(panel: RewardPanel, draft: Draft) -> None:
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


def test_entry_with_arguments(panel: RewardPanel, draft: Draft, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def brevity(completions, limit=9):\n    """Short is good."""\n')
    entry = f"{tmp_path / 'mine.py'}::brevity(limit=20)"
    draft.set("reward_functions", ["length_target(target=80)", entry, "nothing(x=1)"])
    rows = {row.entry.name: place for place, row in enumerate(panel.model.rows)}
    told = panel.model.index(rows[entry], SCORES).data()
    assert told == "Short is good." and panel.model.index(rows[entry], SOURCE).data() == "mine.py"
    assert panel.model.index(rows["length_target(target=80)"], LABEL).data() == "Length Target"
    assert [row.known for row in panel.model.ticked] == [True, True, False]
    assert any("nothing" in fault.sentence for fault in draft.problems() if fault.setting == "reward_functions")


def test_tick_restores_the_weight(panel: RewardPanel, draft: Draft) -> None:
    draft.set("reward_weights", [1.0, 2.0, 3.0, 4.0, 5.0])
    click_cell(panel, 1, USE)
    assert draft.value("reward_weights") == [1.0, 3.0, 4.0, 5.0]
    click_cell(panel, 1, USE)
    assert draft.value("reward_weights") == [1.0, 2.0, 3.0, 4.0, 5.0]
