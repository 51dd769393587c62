"""The Completions page: every completion of a step with its scores; it follows the run until a step is picked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest
from PySide6.QtCore import QModelIndex, QPoint, Qt
from PySide6.QtGui import QGuiApplication

from app import theme
from app.model.session import Session
from app.pages.completions_page import CompletionsPage
from app.widgets.completions.completion_table import BAR_ROLE, STOP_LABELS, CompletionModel
from backend.spec.events import JsonLines
from backend.spec.places import hold_lock
from backend.types import Stop
from tests.support import made_up_runs

ROLE = Qt.ItemDataRole


@pytest.fixture
def page(qtbot, qapp, tmp_path: Path):
    theme.apply(qapp, "light")
    session = Session()
    shown = CompletionsPage(session)
    qtbot.addWidget(shown)
    shown.resize(1060, 700)
    shown.show()
    yield shown
    session.close_run()


def show_run(qtbot, page: CompletionsPage, folder) -> None:
    page.session.open_run(folder.path)
    qtbot.waitUntil(lambda: page.session.run._at_end and page._shown is not None, timeout=5000)


def cell(model: CompletionModel, row: int, head: str, role: int = ROLE.DisplayRole):
    heads = [model.headerData(c, Qt.Orientation.Horizontal) for c in range(model.columnCount())]
    return model.data(model.index(row, heads.index(head)), role)


def test_the_page_follows_the_newest_step(qtbot, page: CompletionsPage, tmp_path: Path) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=5, ending=None)
    show_run(qtbot, page, folder)
    assert page.step.text() == "5" and page.about.text() == "4 prompts, 32 completions"
    rows = JsonLines(folder.completions)
    rows.append({"step": 6, "prompt": "p", "answer": "a", "completions": [{"text": "t", "reward": 1.0}]})
    page.session.run.poll()
    page._refresh()
    assert page.step.text() == "6" and page.about.text() == "1 prompt, 1 completion"
    page.pick(3)
    rows.append({"step": 7, "prompt": "p", "completions": []})
    page.session.run.poll()
    page._refresh()
    assert page.step.text() == "3" and not page.newest.isChecked(), "a step that was picked stays"
    page.newest.setChecked(True)
    assert page.step.text() == "7"


def test_earlier_and_later_skip_steps_without_completions(qtbot, page: CompletionsPage, tmp_path: Path) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=1, ending=None)
    rows = JsonLines(folder.completions)
    rows.append({"step": 4, "prompt": "p", "completions": []})
    show_run(qtbot, page, folder)
    assert page.step.text() == "4" and not page.later.isEnabled()
    page.earlier.click()
    assert page.step.text() == "1" and not page.earlier.isEnabled()
    page.pick(3)
    assert page._shown[1] == 1, "the step before"


def test_selecting_a_completion_shows_it_in_full(qtbot, page: CompletionsPage, tmp_path: Path) -> None:
    show_run(qtbot, page, made_up_runs.make_run(tmp_path / "run", steps=2))
    completion = page.session.run.groups()[0]["completions"][2]
    page.table.selectRow(3)
    assert page.detail.text.toPlainText() == completion["text"]
    assert page.detail.prompt.toPlainText() == page.session.run.groups()[0]["prompt"]
    assert (
        "Accuracy" in page.detail.completion._scores.text()
        and f"{completion['tokens']} tokens" in page.detail.completion._result.text()
    )
    formats = page.detail.text.document().firstBlock().layout().formats()
    assert formats[0].length == len("<think>") and formats[0].format.foreground().color() == theme.palette().accent


def test_in_a_wide_page_the_completion_is_beside_the_table(qtbot, page: CompletionsPage, tmp_path: Path) -> None:
    page.session.open_run(made_up_runs.make_run(tmp_path / "runs" / "one", steps=1).path)
    table = page.table.parentWidget()
    qtbot.waitUntil(lambda: page.model.rowCount() > 0)
    for width, beside in ((1100, False), (1900, True), (1100, False)):
        page.resize(width, 800)
        qtbot.waitUntil(lambda beside=beside: (page.detail.x() > table.x()) is beside)
        assert (page.detail.y() > table.y()) is not beside
        left, right = (pane.mapTo(page, QPoint()).x() for pane in (page.detail.prompt, page.detail.text))
        assert (left == right) is beside, "prompt and completion one above the other"
        assert table.width() > page.detail.width() or not beside


def test_selecting_a_completion_of_a_live_run_stops_following(qtbot, page: CompletionsPage, tmp_path: Path) -> None:
    """The next step, a second later, replaced the text that was being read."""
    folder = made_up_runs.make_run(tmp_path / "run", steps=2, ending=None, now=True)
    handle = hold_lock(folder)
    try:
        show_run(qtbot, page, folder)
        qtbot.waitUntil(lambda: page.session.run.state == "running")
        assert page.newest.isChecked()
        qtbot.keyClick(page.table, Qt.Key.Key_Down)
        assert not page.newest.isChecked() and page.step.text() == "2"
    finally:
        os.close(handle)


def test_rows_are_copied_with_their_headings(qtbot, page: CompletionsPage, tmp_path: Path) -> None:
    show_run(qtbot, page, made_up_runs.make_run(tmp_path / "run", steps=1))
    page.table.selectRow(1)
    qtbot.keyClick(page.table, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    head, line = QGuiApplication.clipboard().text().split("\n")
    assert head.split("\t")[:3] == ["Completion", "Accuracy", "Integer Answer"] and line.startswith("<think>")


GROUP = {
    "step": 1, "prompt": "What\nis it?", "answer": "4",
    "completions": [
        {"text": "a\nb", "tokens": [5, 6, 7], "stop": "eos", "rewards": {"f": 0.5, "g": None}, "reward": 0.5, "advantage": 0.7},
        {"text": "", "tokens": 9, "stop": "length", "rewards": {"f": -1.0}, "reward": -1.0, "advantage": -0.7},
        {"text": None, "rewards": "odd"},
        "odd",
    ],
}  # fmt: skip


def test_a_group_of_any_shape_becomes_table_rows(qtbot) -> None:
    model = CompletionModel()
    model.show_groups([GROUP, {"step": 1}], ["f", "g"], ["F", "G"])
    assert model.rowCount() == 5 and model.rowCount(model.index(0, 0)) == 0
    assert cell(model, 0, "Completion") == "What is it?   answer 4"
    assert (cell(model, 0, "Reward"), cell(model, 0, "Advantage")) == ("−0.250", ""), "the mean of the group"
    assert [cell(model, 1, head) for head in ("Completion", "F", "G", "Reward", "Tokens", "End")] == [
        "a b", "0.500", "–", "0.500", "3", "ended"]  # fmt: skip
    assert [cell(model, 2, head) for head in ("Completion", "F", "Advantage", "Tokens", "End")] == [
        "", "−1.00", "−0.700", "9", "cut off"]  # fmt: skip
    assert [cell(model, 3, head) for head in ("Completion", "F", "Reward", "Tokens", "End")] == ["–"] * 5
    assert cell(model, 4, "Completion") == "–"


def test_advantage_is_blue_above_zero_and_orange_below(qtbot) -> None:
    model = CompletionModel()
    model.show_groups([GROUP], ["f", "g"], ["F", "G"])
    colours = [cell(model, row, "Advantage", ROLE.ForegroundRole) for row in (1, 2)]
    assert colours == [theme.palette().advantage_above, theme.palette().advantage_below]


def test_a_score_has_a_bar_in_the_colour_of_its_function(qtbot) -> None:
    model = CompletionModel()
    model.show_groups([GROUP], ["f", "g"], ["F", "G"])
    assert cell(model, 1, "F", BAR_ROLE) == (0.5, theme.reward_colour(0))
    assert cell(model, 2, "F", BAR_ROLE) == (-1.0, theme.reward_colour(0))
    assert cell(model, 1, "G", BAR_ROLE) is None and cell(model, 1, "Reward", BAR_ROLE) is None
    assert QModelIndex() != model.index(0, 0)


def test_every_stop_reason_that_a_trainer_writes_has_a_label() -> None:
    """A completion that a stop string had ended was shown with the raw word of the file."""
    assert set(get_args(Stop)) == set(STOP_LABELS)
