"""The Evaluate page: the result first, its figures and rows, both sides of a row, and an evaluation that is being
made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QLocale, Qt
from PySide6.QtGui import QGuiApplication, QIntValidator
from PySide6.QtTest import QTest

from app import theme
from app.pages.evaluate.evaluate_page import EvaluatePage
from app.state.evaluations import Evaluations
from app.state.processes import ProcessOutcome
from app.state.session import Session
from app.widgets.basic.controls import NumberEdit
from backend.runs.run_folder import RunFolder
from tests.support import made_up_evaluations, made_up_runs
from tests.support.trainer_by_hand import add_checkpoints, locked
from tests.support.windows import ProcessByHand, SilentService, table_texts


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = made_up_runs.make_run(tmp_path / "runs" / "mine", steps=4, total=4)
    add_checkpoints(made, {2: None, 4: None})
    return made


@pytest.fixture
def page(qtbot, qapp, run: RunFolder):
    ProcessByHand.made.clear()
    session = Session()
    session.service = SilentService()
    session.evaluations = Evaluations(session.consent, session, ProcessByHand)
    session.open_run(run.path)
    shown = qtbot.show(EvaluatePage(session), 1060, 700)
    qtbot.waitUntil(lambda: session.run is not None and session.run.state == "finished")
    yield shown
    session.close_run()


def shows_rows(qtbot, page: EvaluatePage, count: int) -> None:
    qtbot.waitUntil(lambda: page.row_model.rowCount() == count)


def figures(page: EvaluatePage) -> dict[str, list[str]]:
    return {cells[0]: cells[1:6] for cells in table_texts(page.figures_model)}


def test_the_result_comes_first(qtbot, page: EvaluatePage, run: RunFolder) -> None:
    assert page.not_yet.isVisible() and not page.card.isVisible()
    made_up_evaluations.write(run, "test-step-4")
    page.evaluations.refresh()
    shows_rows(qtbot, page, 40)
    assert page.card.isVisible() and not page.not_yet.isVisible()
    evaluation = page.evaluations.shown.evaluation
    change = evaluation.headline.difference.reward
    assert change.excludes_zero and page.card.title.text() == "Better on prompts not seen in training"
    assert page.card.sentence.text() == evaluation.sentence()
    cells = figures(page)
    assert list(cells) == ["Reward", "Accuracy", "Integer Answer", "Pass@1", "Tokens", "Cut off"]
    before, after, _, moved, interval = cells["Reward"]
    sides = evaluation.headline.sides
    expected = [sides[side].figures.reward.value for side in ("base", "tuned")]
    assert [float(before), float(after)] == pytest.approx(expected, abs=5e-4)
    assert moved == f"+{change.value:.3f}" and interval == f"+{change.low:.3f} to +{change.high:.3f}"
    assert cells["Pass@1"][1].endswith("%")


def test_rows_side_by_side(qtbot, page: EvaluatePage, run: RunFolder) -> None:
    made_up_evaluations.write(run, "test-step-4")
    page.evaluations.refresh()
    shows_rows(qtbot, page, 40)
    decoding = page.evaluations.shown.evaluation.headline
    for kind, count in (("better", decoding.better), ("worse", decoding.worse), ("unchanged", decoding.unchanged)):
        qtbot.mouseClick(page.kind.buttons[kind], Qt.MouseButton.LeftButton)
        assert page.row_model.rowCount() == count and f"{count}" in page.kind.buttons[kind].text()
    page.kind.choose("worse")
    worst = page.row_model.rows[0]
    assert worst.change == -1.0
    left, right = (pane.text.toPlainText() for pane in page.detail.panes)
    assert (left, right) == (f"base {worst.number - 1}", f"tuned {worst.number - 1}")
    assert f"Is it {worst.number - 1}?" in page.detail.prompt.text()
    page.rows.copy()
    assert "Change" in QGuiApplication.clipboard().text().splitlines()[0]


def test_start_and_show(qtbot, page: EvaluatePage, run: RunFolder) -> None:
    assert [page.form.checkpoint.itemData(i) for i in range(page.form.checkpoint.count())] == ["end", "best", "4", "2"]
    page.form.checkpoint.setCurrentIndex(3)
    page.form.limit.setText("64")
    qtbot.mouseClick(page.form.button, Qt.MouseButton.LeftButton)
    (process,) = ProcessByHand.made
    words = [str(run.path), "--stream", "--split", "", "--checkpoint", "2", "--limit", "64"]
    assert process.is_started and process.command[-8:] == words
    assert page.form.button.text() == "Stop" and not page.form.split.isEnabled()
    assert page.not_yet.title.text() == "Evaluating"
    process.line.emit('{"phase": "Sampling the base model, greedy", "done": 0.25, "left_s": 65.0}')
    assert page.form.bar.value() == 250 and "1\u202fmin 05\u202fs left" in page.form.status.text()
    process.line.emit("a line of somebody's library")
    path = made_up_evaluations.write(run, "test-step-2")
    process.done.emit(ProcessOutcome(True, 0, f'{{"path": "{path}"}}', ""))
    assert page.form.button.text() == "Evaluate" and page.evaluations.shown.path == path
    assert not page.form.problem.isVisible() and page.form.split.isEnabled()


def test_stop_and_failure(qtbot, page: EvaluatePage) -> None:
    page.start()
    qtbot.mouseClick(page.form.button, Qt.MouseButton.LeftButton)
    assert ProcessByHand.made[0].is_cancelled and page.evaluations.running is None and not page.form.problem.isVisible()
    page.start()
    ProcessByHand.made[1].done.emit(ProcessOutcome(False, 2, "test_split: demo/data has no test split: add one.", ""))
    assert page.form.problem.isVisible() and page.form.problem.text() == "demo/data has no test split: add one."
    page.start()
    assert not page.form.problem.isVisible() and len(ProcessByHand.made) == 3


def test_numbers_are_typed_as_in_a_config(qapp) -> None:
    QLocale.setDefault(QLocale("en_US"))  # whose validators accept "1,000"
    theme.apply(qapp, "light")
    field = NumberEdit()
    field.setValidator(QIntValidator(1, 1_000_000, field))
    QTest.keyClicks(field, "1,000")
    assert field.text() == "1000"


def test_a_run_that_trains_is_not_evaluated(page: EvaluatePage, run: RunFolder, qtbot) -> None:
    with locked(run):
        run.events.write_text("\n".join(run.events.read_text().splitlines()[:-1]) + "\n")
        page.session.open_run(run.path)
        qtbot.waitUntil(lambda: page.session.run.is_live)
        page._show_running()
        assert not page.form.button.isEnabled() and "once it has ended" in page.form.problem.text()
        page.start()
        assert not ProcessByHand.made


def test_one_side_alone_has_no_comparison(qtbot, page: EvaluatePage, run: RunFolder) -> None:
    rows: list[Any] = [made_up_evaluations.evaluated_row(i, None, float(i % 2)) for i in range(6)]
    for row in rows:
        row["greedy"] = {"base": row["greedy"]["tuned"]}
    made_up_evaluations.write_evaluation(run.evaluations, made_up_evaluations.evaluation(rows), rows)
    page.evaluations.refresh()
    shows_rows(qtbot, page, 6)
    assert page.card.title.text() == "Evaluated" and not page.kind.buttons["better"].isVisible()
    assert page.rows.isColumnHidden(4) and page.row_model.index(1, 3).data() == "1.00"
    assert page.detail.panes[0].isVisible() and not page.detail.panes[1].isVisible()
    assert page.decoding.buttons["sampled"].isHidden()
