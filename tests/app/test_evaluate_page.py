"""The Evaluate page: the result first, its figures and rows, both sides of a row, and an evaluation being made."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PySide6.QtCore import QLocale, Qt
from PySide6.QtGui import QGuiApplication, QIntValidator
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app import theme
from app.pages.evaluate.evaluate_page import EvaluatePage
from app.pages.runs import compare_view
from app.pages.runs.compare_view import CompareView
from app.state.correctness import Correctness
from app.state.processes import ProcessOutcome
from app.state.session import Session
from app.widgets.basic.controls import NumberEdit
from app.widgets.basic.number_format import figure
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import as_markdown, change_notes, read_record
from tests.support import made_up_evaluations, made_up_runs
from tests.support.trainer_by_hand import add_checkpoints, locked
from tests.support.windows import PatientQtBot, ProcessByHand, table_texts


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = made_up_runs.make_run(tmp_path / "runs" / "mine", steps=4, total=4)
    add_checkpoints(made, {2: None, 4: None})
    return made


@pytest.fixture
def page(qtbot, session: Session, run: RunFolder, monkeypatch) -> EvaluatePage:
    ProcessByHand.made.clear()
    monkeypatch.setattr("app.state.evaluations.VerbProcess", ProcessByHand)
    session.open_run(run.path)
    shown = qtbot.show(EvaluatePage(session), 1060, 700)
    qtbot.waitUntil(lambda: session.run is not None and session.run.state == "finished")
    return shown


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
    assert worst.means["greedy"].change == -1.0
    left, right = (pane.text.toPlainText() for pane in page.detail.panes)
    assert (left, right) == (f"base {worst.index}", f"tuned {worst.index}")
    assert f"Is it {worst.index}?" in page.detail.prompt.text()
    page.rows.copy()
    assert "Change" in QGuiApplication.clipboard().text().splitlines()[0]


def test_start_and_show(qtbot, page: EvaluatePage, run: RunFolder) -> None:
    assert [page.form.checkpoint.itemData(i) for i in range(page.form.checkpoint.count())] == ["end", "best", "4", "2"]
    page.form.checkpoint.setCurrentIndex(3)
    page.form.limit.setText("0")
    assert not page.form.button.isEnabled() and "between 1 and" in page.form.problem.text(), "it evaluated all"
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
    process.done.emit(ProcessOutcome(True, f'{{"path": "{path}"}}', ""))
    assert page.form.button.text() == "Evaluate" and page.evaluations.shown.path == path
    assert not page.form.problem.isVisible() and page.form.split.isEnabled()


def test_stop_and_failure(qtbot, page: EvaluatePage) -> None:
    page.start()
    qtbot.mouseClick(page.form.button, Qt.MouseButton.LeftButton)
    assert ProcessByHand.made[0].is_cancelled and page.evaluations.running is None and not page.form.problem.isVisible()
    page.start()
    ProcessByHand.made[1].done.emit(ProcessOutcome(False, "test_split: demo/data has no test split: add one.", ""))
    assert page.form.problem.isVisible() and page.form.problem.text() == "demo/data has no test split: add one."
    page.start()
    assert not page.form.problem.isVisible() and len(ProcessByHand.made) == 3


def test_what_the_user_has_marked_as_correct_passes(page: EvaluatePage, monkeypatch) -> None:
    change_notes(page.session.run.folder, correctness="mine")
    monkeypatch.setattr("app.pages.evaluate.evaluate_page.correctness_of", lambda run: Correctness("mine", 0.5))
    page.start()
    assert ProcessByHand.made[0].command[-2:] == ["--pass", "mine>=0.5"]


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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs for all tests, which change only copies of them."""
    folder = tmp_path_factory.mktemp("compared")
    for name, steps, rate in (("slow", 60, 1e-6), ("fast", 30, 1e-4), ("third", 12, 1e-5)):
        made_up_runs.make_run(folder / name, steps=steps, learning_rate=rate)
    return folder


@pytest.fixture
def archive(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs, tmp_path / "runs"))


@pytest.fixture(scope="module")
def unchanged(request: pytest.FixtureRequest, qapp: QApplication, runs: Path) -> Iterator[CompareView]:
    """One view for the tests that only look at it: drawing its charts is most of what they take."""
    theme.apply(qapp, "light")
    shown = CompareView(Session())
    shown.resize(1100, 760)
    shown.show()
    compare(PatientQtBot(request), shown, runs, "slow", "fast")
    yield shown
    shown.close_runs()
    shown.close()
    shown.deleteLater()


@pytest.fixture
def view(qtbot, qapp, archive: Path):
    shown = qtbot.show(CompareView(Session()), 1100, 760)
    compare(qtbot, shown, archive, "slow", "fast")
    yield shown
    shown.close_runs()


def compare(qtbot: QtBot, view: CompareView, archive: Path, *names: str) -> None:
    view.compare([read_record(RunFolder(archive / name)) for name in names])
    qtbot.waitUntil(lambda: view.comparison is not None and not view.comparison.is_reading)
    view.refresh()
    qtbot.waitUntil(lambda: not view.grid.turns.isActive())


def plot(view: CompareView, title: str):
    return next(plot for plot in view.grid.plots if plot.title == title)


def test_the_axis_can_be_tokens_or_time(qtbot, view: CompareView, archive: Path) -> None:
    slow = view.comparison.runs[0]
    reward = view.comparison.metrics()[0]
    tokens, values = view.comparison.curve(slow, reward, "tokens")
    assert tokens[-1] == 60 * 3100 and values[-1] == slow.series("reward")[1][-1]
    assert np.isnan(values[0]), "nothing is made up"
    assert set(values[np.isfinite(values)]) == set(slow.series("reward")[1])
    fast = view.comparison.curve(view.comparison.runs[1], reward, "tokens")
    assert np.array_equal(fast[0], tokens) and np.isnan(fast[1][-1]), "no curve goes on after its run"
    milliseconds, _ = view.comparison.curve(slow, reward, "time")
    assert milliseconds[-1] == pytest.approx(1000 * np.sum(slow.series("time/step")[1]), abs=1)
    view.axis.choose("tokens")
    qtbot.waitUntil(lambda: plot(view, "Reward").traces[0].x[-1] == 60 * 3100)
    plot(view, "Reward").set_step(None)
    fast_rewards = view.comparison.runs[1].series("reward")[1]
    assert plot(view, "Reward").traces[1].at(None) == fast_rewards[-1], "of a run that ended early too"
    plot(view, "Reward").set_step(int(tokens[-1]))
    assert plot(view, "Reward").step_label.text() == "186,000 tokens"
    texts = [action.text() for action in plot(view, "Reward").menu().actions()]
    assert "Completions of this step" not in texts, "of which run?"
    for chip in view.legend.chips:
        chip.click()
    assert len(view.legend.shown()) == len(view.legend.chips), "hiding the last one shows all again"
    view.axis.choose("time")
    qtbot.waitUntil(lambda: plot(view, "Reward").traces[0].x[-1] == milliseconds[-1])
    axis = plot(view, "Reward").view.step_axis
    assert axis.tickStrings([60_000], axis.scale, 1)[0] in ("1 min", "60 s"), "a low plot has no title with the unit"


def test_the_tables_show_what_differs_and_what_was_reached(unchanged: CompareView) -> None:
    settings, results = unchanged.tables()
    assert settings == [["Setting", "A  slow", "B  fast"], ["Learning Rate", "1e-06", "0.0001"]]
    header = unchanged.settings.horizontalHeader()
    assert header.textElideMode() == Qt.TextElideMode.ElideMiddle, "names of runs were cut without a sign"
    at = results[0].index("Held-out, best")
    shown = [[*row[:3], *row[at : at + 2]] for row in results]
    assert shown[0][:3] == ["Run", "State", "Steps"]
    assert shown[1:] == [["A  slow", "finished", "60", "3.1", "60"], ["B  fast", "finished", "30", "1.9", "20"]]
    state, _, result = unchanged.results.table[1][1:4]
    assert state == "Finished" and result.split(", ")[-1] == "training" and " to " in result.split(", ")[1]
    last = unchanged.comparison.runs[0].series("reward")[1][-15:]
    assert result.split(", ")[0] == figure(float(last.mean())), "over the last quarter of the steps"


def test_both_tables_are_copied_and_saved(unchanged: CompareView, tmp_path: Path, monkeypatch) -> None:
    unchanged.export_menu().actions()[0].trigger()
    text = QGuiApplication.clipboard().text()
    assert "| Learning Rate | 1e-06 | 0.0001 |" in text and "| A  slow | finished | 60 |" in text
    monkeypatch.setattr(compare_view, "save_file", lambda *_: tmp_path / "tables.csv")
    unchanged.export_menu().actions()[-1].trigger()
    assert "Learning Rate,1e-06,0.0001" in (tmp_path / "tables.csv").read_text()
    assert as_markdown(unchanged.tables()[0]) in text


def test_the_same_prompt_of_two_runs_side_by_side(qtbot, view: CompareView, archive: Path) -> None:
    view.part.choose("completions")
    panel = view.prompts
    # Both runs were made with the same random numbers: at the newest step that both have, 30, they share every prompt.
    qtbot.waitUntil(lambda: panel.prompt.count() == 4)
    assert panel.where.text() == "step 30" and panel.sides.isVisible()
    best = max(one["reward"] for one in panel.shared[0][0]["completions"])
    assert panel.sides._sides["A  slow"][0]["reward"] == best
    rows = [json.loads(line) for line in (archive / "fast" / "completions.jsonl").read_text().splitlines()]
    third = archive / "third" / "completions.jsonl"
    for row in rows:
        for one, reward in zip(row["completions"], (None, -1.0, 0.0, *[-2.0] * 99), strict=False):
            one["reward"] = reward
    third.write_text("".join(json.dumps(row) + "\n" for row in rows))
    compare(qtbot, view, archive, "slow", "third")
    qtbot.waitUntil(lambda: "B  third" in panel.sides._sides)
    assert panel.sides._sides["B  third"][0]["reward"] == 0, "the best of rewards of at most 0"
    for row in rows:
        row["prompt"] = f"Other: {row['prompt']}"
    third.write_text("".join(json.dumps(row) + "\n" for row in rows))
    compare(qtbot, view, archive, "slow", "third")
    qtbot.waitUntil(lambda: panel.nothing.isVisible())
