"""Runs that the real trainer made, on the pages that show them, light and dark; and a random walk over the window with
them: whatever is visible and enabled is clicked, typed into, chosen, scrolled.

Made-up runs lack what a newer trainer records, so a page may fail on every real run while their tests are green. An
exception that reaches `sys.excepthook` fails the walk. The suite walks a little way; the proof goes 2,000 actions for
each seed, which take 20 to 40 seconds.
"""

import random
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6 import QtWidgets
from PySide6.QtCore import QEvent, QFile, QPoint, QProcess, Qt
from PySide6.QtGui import QAction, QDesktopServices, QPixmap
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app import theme
from app.pages import PAGES
from app.pages.completions.completions_page import CompletionsPage
from app.pages.completions.reading_pane import MEASURES
from app.pages.evaluate.evaluate_page import EvaluatePage
from app.pages.monitor.monitor_page import MonitorPage, changes
from app.pages.rewards.rewards_page import RewardsPage
from app.pages.runs.compare_view import CompareView
from app.pages.runs.run_actions import CloneDialog
from app.pages.runs.run_table import ColumnDialog
from app.pages.runs.runs_page import RunsPage
from app.state.prefs import Prefs
from app.state.run_completions import FILTERS
from app.state.session import Session
from app.theme import CELL_PADDING
from app.widgets.basic.number_format import DASH, duration, figure
from app.widgets.export_panel import ExportPanel
from app.widgets.run_header import Switcher, SwitcherMenu
from app.window import Window
from backend.runs.completion_rows import prompt_key
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import change_notes, read_notes, read_record
from backend.trainer.evaluation.evaluation_rows import read_rows
from tests.support.latency import LatencyProbe
from tests.support.real_runs import make_runs
from tests.support.windows import ServiceHere, active_window, cut_texts

ACROSS, DOT = Qt.Orientation.Horizontal, Qt.ItemDataRole.DecorationRole


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with runs of every kind, made by the real trainer. Tests that change it copy it first."""
    return make_runs(tmp_path_factory.mktemp("real"))


@pytest.fixture(params=["light", pytest.param("dark", marks=pytest.mark.proof)])
def session(qapp: QApplication, real_runs: Path, monkeypatch, request: pytest.FixtureRequest) -> Iterator[Session]:
    theme.apply(qapp, request.param)
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(real_runs))
    opened = Session()
    yield opened
    opened.close_run()
    theme.apply(qapp, "light")


def show_run(qtbot: QtBot, session: Session, folder: Path) -> None:
    session.open_run(folder)
    qtbot.waitUntil(lambda: session.run is not None and session.run.has_caught_up)
    session.run.changed.emit()


@pytest.mark.parametrize(
    "name", ["lora", "failed", *(pytest.param(name, marks=pytest.mark.proof) for name in ("full", "stages"))]
)
def test_monitor(qtbot: QtBot, session: Session, real_runs: Path, name: str) -> None:
    """Every included chart is drawn, with its marks and with smoothing; the card has the result."""
    page = qtbot.show(MonitorPage(session), 1100, 760)
    show_run(qtbot, session, real_runs / name)
    page.grid.set_smoothing(0.6)
    for plot in page.grid.included_plots():
        page.grid.draw(plot)
        plot.set_log(True)
        assert plot.traces or plot.waiting.text(), plot.title
    titles = {plot.title for plot in page.grid.included_plots() if plot.traces}
    if name == "failed":
        assert page.verdict.title.text() == "Failed before the first step" and not titles
        assert "Out of luck" in page.verdict.sentence.text()
        assert page.verdict.buttons[0].text() == "Start over", "a checkpoint of step 0 holds nothing learned"
        assert page.verdict.advice.text() == "Fix this, then start over."
        rewards = qtbot.show(RewardsPage(session), 1100, 760)
        session.draft.load(real_runs / name / "config.yaml", as_preset=True)
        next(button for button in page.verdict.buttons if "line 5" in button.text()).click()
        assert rewards.views.key == "file" and rewards.panel.editor.textCursor().blockNumber() == 4
        assert "Out of luck" in rewards.panel.trouble.text()
    else:
        assert page.verdict.title.text().startswith("Finished: 3 steps")
        assert {"Reward", "Loss", "Speed", "Memory"} <= titles
        assert ("Held-out reward" in titles) is (name == "lora")
        assert page.tiles["reward"].figure() != DASH
    session.open_run(real_runs / "stages")
    assert not any(plot.traces for plot in page.grid.plots), "a chart not yet drawn again showed the run before"


def test_what_came_of_a_run(qtbot: QtBot, session: Session, real_runs: Path, tmp_path: Path, monkeypatch) -> None:
    """The share that is right by the reward that the user has marked, else the reward; and the newest evaluation."""
    page = qtbot.show(MonitorPage(session), 1100, 760)
    show_run(qtbot, session, shutil.copytree(real_runs / "full", tmp_path / "full"))
    run = session.run
    assert [(each.label, each.most) for each in changes(run)] == [("Reward in training", 0.75)]
    run.data._take_change(2, {"reward_weights": [[1.0, 0.5], [1.0, 1.0]]})
    assert [each.most for each in changes(run)] == [None], "weights vary"
    change_notes(run.folder, correctness="r1_int_reward_func")
    run.changed.emit()
    shares = run.series("rewards/r1_int_reward_func/mean")[1] / 0.5
    (change,) = changes(run)
    assert (change.label, change.unit, change.after) == ("Correct in training", "share", shares[-1])
    assert page.tiles["correct"].figure() == figure(shares[-1], "share")
    page.grid.mark_step(2)
    show_run(qtbot, session, shutil.copytree(real_runs / "lora", tmp_path / "lora"))
    assert {plot.step for plot in page.grid.plots} == {None}, "the step of the run before was marked in this one"
    change_notes(RunFolder(tmp_path / "lora"), correctness="low_half")
    labels = [each.label.partition(":")[0] for each in changes(session.run)]
    graded = "a graded score is no share"
    assert labels == ["Reward in training", "Reward on held-out prompts", "Evaluated on valid"], graded
    with monkeypatch.context() as patch:
        for reader in ("app.state.correctness.read_notes", "backend.trainer.evaluation.evaluation_rows.read_bytes"):
            patch.setattr(reader, lambda *_: pytest.fail("an unchanged file was read"))
        session.run.changed.emit()
    show_run(qtbot, session, real_runs / "failed")
    assert page.grid.isHidden() and page.log.text.isVisible(), "no empty charts of a run that failed at once"
    page.hide()  # the other run is chosen on another page
    show_run(qtbot, session, real_runs / "lora")
    page.show()
    assert page.grid.isVisible() and not page.log.text.isVisible(), "the log took half of the next run's page"


def test_sections_of_charts_stay_folded(qtbot: QtBot, session: Session, real_runs: Path) -> None:
    page = qtbot.show(MonitorPage(session), 1100, 760)
    show_run(qtbot, session, real_runs / "lora")
    shown = {plot.section for plot in page.grid.plots if not plot.isHidden()}
    assert shown == {"Learning", "Completions", "Held-out", "Speed"}, "raw names are folded at first"
    assert not page.grid.sections["Other"].isHidden() and page.grid.sections["Other"].text().startswith("Other, ")
    for name in ("Other", "Learning"):
        QTest.mouseClick(page.grid.sections[name], Qt.MouseButton.LeftButton)
    again = qtbot.show(MonitorPage(session), 1100, 760)
    again.grid.refresh()
    assert {plot.section for plot in again.grid.plots if not plot.isHidden()} == {*shown, "Other"} - {"Learning"}


def test_completions(qtbot: QtBot, session: Session, real_runs: Path) -> None:
    """Every filter and every colouring of tokens, over a step and over the whole run."""
    page = qtbot.show(CompletionsPage(session), 1100, 760)
    show_run(qtbot, session, real_runs / "lora")
    page.pick(1)
    for index, measure in enumerate(MEASURES, 1):
        page.pane.measure.setCurrentIndex(index)
        assert page.pane.legend.isVisible() or page.pane.explanation.text(), measure.label
    for scope in ("step", "run"):
        page.bar.scope.choose(scope)
        qtbot.waitUntil(lambda scope=scope: scope == "step" or page.model.rowCount() == 6)
        for name in FILTERS:
            page.bar.show_filter(name)
        page.bar.reset()
    rows = range(page.model.rowCount())
    assert all(page.model.index(row, column).data() for row in rows for column in (0, 1))
    page.table.selectAll()
    assert page.table.as_text(page.table.selected_rows()).count("\n") == len(rows)


def test_conversations(qtbot: QtBot, session: Session, real_runs: Path) -> None:
    """The calls of a run with tools: in the pane, the table, a search, and in its charts."""
    page = qtbot.show(CompletionsPage(session), 1100, 760)
    show_run(qtbot, session, real_runs / "tools")
    page.pick(1)
    calling = [at for at, line in enumerate(page.model.rows) if len((line.completion or {}).get("turns", ())) == 2]
    page.table.selectRow(calling[0])
    expression = page.detail.prompt.toPlainText().rstrip("=")
    assert f'→ calculate(expression="{expression}")' in page.pane.text.toPlainText()
    assert page.pane.hint.text().startswith("Grey: results of tools")
    assert str(page.model.index(calling[0], 0).data()).startswith("2 turns, 1 call · <answer>")
    assert page.pane.result.text().endswith("2 turns, 1 call</span>")
    page.pane.measure.setCurrentIndex(1)
    masked = page.pane.tokens.trained.count(False)
    assert masked == page.table.current_line.completion["turns"][0]["result_tokens"] > 0
    page.find("→ calculate(")
    qtbot.waitUntil(lambda: page.model.rowCount() == len(calling))
    shown = {plot.title for plot in qtbot.show(MonitorPage(session), 1100, 760).grid.included_plots()}
    assert {"Tools", "Tool failures"} <= shown


def test_a_reward_has_one_colour(qtbot: QtBot, window: Window, real_runs: Path) -> None:
    """On every page, whatever else is ticked, and after a restart."""
    session = window.session
    window.show()
    for kind in ("lora", "full"):
        show_run(qtbot, session, real_runs / kind)
        for key in ("monitor", "completions", "evaluate", "train"):
            window.show_page(key)
    names = session.run.reward_names
    colours = {name: theme.reward_colour(name).name() for name in ("low_half", *names)}
    assert len(set(colours.values())) == 3

    def of(dot: QPixmap) -> str:
        return dot.toImage().pixelColor(dot.rect().center()).name()

    grid, seen, table = window.pages["monitor"].grid, window.pages["completions"], window.pages["train"].rewards.model
    plot = next(plot for plot in grid.plots if plot.title == "Rewards per function")
    grid.draw(plot)
    assert [trace.pen.color().name() for trace in plot.traces] == [colours[name] for name in names]
    assert [of(seen.model.headerData(at, ACROSS, DOT)) for at in (1, 2)] == [colours[name] for name in names]
    assert all(colours[name] in seen.pane.scores.text() for name in names)
    show_run(qtbot, session, real_runs / "lora")
    assert of(window.pages["evaluate"].figures_model.index(1, 0).data(DOT)) == colours["low_half"]
    session.draft.load(real_runs / "full" / "config.yaml", as_preset=True)
    rows = [at for at, row in enumerate(table.rows) if row.ticked]
    table.setData(table.index(rows[0], 0), Qt.CheckState.Unchecked, Qt.ItemDataRole.CheckStateRole)
    assert [of(table.index(at, 1).data(DOT)) for at in rows] == [theme.palette().hairline.name(), colours[names[1]]]
    again, other = Prefs(session.prefs.folder), Prefs(session.prefs.folder)
    numbers = [session.prefs.reward_number(name) for name in colours]  # those of the draft may come between them
    assert [again.reward_number(name) for name in colours] == numbers
    assert again.reward_number("new") == other.reward_number("new") > max(numbers)


def test_menu_of_a_completion(qtbot: QtBot, session: Session, real_runs: Path, tmp_path: Path) -> None:
    page = qtbot.show(CompletionsPage(session), 1100, 760)
    show_run(qtbot, session, shutil.copytree(real_runs / "lora", tmp_path / "lora"))
    page.pick(1)
    page.table.selectRow(1)

    def choose(*path: str) -> None:
        menu = page.menu()
        for text in path:
            action = next(action for action in menu.actions() if action.text() == text)
            assert action.isEnabled(), text
            menu = action.menu() or menu
        action.trigger()

    choose("Copy prompt")
    assert QApplication.clipboard().text() == page.table.current_line.row["prompt"]
    choose("Copy completion")
    assert QApplication.clipboard().text() == page.table.current_line.completion["text"]
    assert page.pane.hint.text()
    choose("Compare with the best of its group")
    assert len(page.table.selected_rows()) == 2 and page.pane.title.text().startswith("From step 1")
    assert not page.pane.hint.text()
    session.message.connect((told := list[str]()).append)
    choose("Correct according to", "Low half")
    assert told == ["Low half gives partial scores: it does not say what is correct."]
    assert read_notes(RunFolder(tmp_path / "lora")).correctness == page.bar.query.right == "low_half"
    page.bar.scope.choose("run")
    qtbot.waitUntil(lambda: page.model.rowCount() == 6)
    at = next(at for at, column in enumerate(page.model.columns) if column.title == "Prompt")
    assert page.model.index(0, at).data() == page.model.rows[0].row["prompt"]
    asked: list[tuple[str, ...]] = []
    session.prompt_requested.connect(asked.append)
    choose("Find in Evaluate")
    evaluate = qtbot.show(EvaluatePage(session), 1100, 760)
    evaluate.show_prompt(asked[0])
    shown = read_rows(evaluate.evaluations.listed[0].path)
    evaluate.show_prompt(wanted := [prompt_key(row) for row in shown][-1])
    qtbot.waitUntil(lambda: evaluate.rows.currentIndex().isValid())
    assert evaluate.row_model.rows[evaluate.rows.currentIndex().row()].key == wanted
    evaluate.rows.selectRow(0)
    evaluate.show_prompt(wanted)
    assert evaluate.row_model.rows[evaluate.rows.currentIndex().row()].key == wanted, "and once more"


@pytest.mark.parametrize("session", ["light"], indirect=True)
def test_own_csv_is_evaluated_after_two_clicks(qtbot: QtBot, session: Session, real_runs: Path, monkeypatch) -> None:
    """Of a run whose dataset is one file; the file dialog's double click is the second."""
    session.service = ServiceHere()  # pyright: ignore
    own = real_runs.parent / "own.csv"
    own.write_text("prompt,answer\nWhat is 0 plus 0?,0\nWhat is 40 plus 2?,42\n")
    page = qtbot.show(EvaluatePage(session), 1100, 760)
    show_run(qtbot, session, real_runs / "full")
    qtbot.waitUntil(page.form.hold_out.isVisible)
    assert page.form.split.currentText() == "Training, 8" and "has trained on" in page.form.hint.text()
    page.form.hold_out.click()
    assert session.draft.value("validation_split") == 0.1
    monkeypatch.setattr(QtWidgets.QFileDialog, "getOpenFileName", lambda *_: (str(own), ""))
    page.form.limit.setText("2")
    qtbot.mouseClick(page.form.own, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: page.evaluations.running is None)
    assert page.card.isVisible() and page.evaluations.problem == ""
    assert "own.csv" in page.card.title.text() + page.card.sentence.text()
    assert "1 of these 2 prompts" in page.card.advice.text() and page.picker.currentText().startswith("own.csv, step 3")


@pytest.mark.parametrize("session", ["light"], indirect=True)
@pytest.mark.usefixtures("helper")
def test_what_is_typed_in_chat_loads_the_run_and_is_asked(qtbot: QtBot, session: Session, real_runs: Path) -> None:
    show_run(qtbot, session, real_runs / "lora")
    with active_window(session, qtbot) as window:
        window.show_page("chat")
        page = window.pages["chat"]
        assert page.models.text() == "lora" and page.prompt.hasFocus()
        session.consent.ask = lambda requests: True
        page.panel.fields["max_tokens"].setText("4")
        probe = LatencyProbe(page)
        for asked in ("Hello", "And?"):
            assert QApplication.focusWidget() is page.prompt
            QTest.keyClicks(page.prompt, asked)
            QTest.keyClick(page.prompt, Qt.Key.Key_Return)
            qtbot.waitUntil(lambda asked=asked: [turn.prompt for turn in page.chat.turns][-1:] == [asked])
            qtbot.waitUntil(lambda: page.chat.state == "ready")
        assert page.prompt.hasFocus() and all(turn.is_first for turn in page.chat.turns)
        qtbot.waitUntil(lambda: all(answer.scores for turn in page.chat.turns for answer in turn.answers.values()))
        page.rows.next.click()
        qtbot.waitUntil(lambda: page.prompt.toPlainText().startswith("What is "))
        page.panel.fields["max_tokens"].setText("4000")
        page.send()
        qtbot.waitUntil(lambda: bool(page.chat.turns[2].answers["tuned"].text))
        page.chat.stop()
        assert page.chat.turns[2].answers["tuned"].state == "stopped"
        probe.check()
        with qtbot.waitSignal(page.chat._service._process.ended):
            page.chat.unload()
    session.service.close()


@pytest.mark.parametrize("key", ["monitor", "completions", "evaluate"])
def test_another_run_is_shown_by_typing_its_name(qtbot: QtBot, session: Session, real_runs: Path, key: str) -> None:
    window = qtbot.show(Window(session), 1280, 800)
    show_run(qtbot, session, real_runs / "lora")
    window.show_page(key)
    window.menus["switch_run"].trigger()
    menu = window.findChild(SwitcherMenu)
    assert menu is not None and menu.model.rows[menu.table.currentIndex().row()].text == "lora"
    assert len(menu.model.rows) > 8 and menu.search.hasFocus()
    QTest.keyClicks(menu.search, "st")
    found = menu.model.rows
    assert len(found) > 1 and all("st" in choice.text for choice in found)
    QTest.keyClick(menu.search, Qt.Key.Key_Down)
    QTest.keyClick(menu.search, Qt.Key.Key_Return)
    assert session.run is not None and str(session.run.folder.path) == found[1].value
    assert [each.text() for each in window.pages[key].findChildren(Switcher)] == [found[1].text]


def test_runs(qtbot: QtBot, session: Session, real_runs: Path, monkeypatch) -> None:
    """Every setting and metric as a column, the details of each run, and the dialogs over it."""
    page = qtbot.show(RunsPage(session), 1104, 580)  # of a window of 1280 × 680
    qtbot.waitUntil(lambda: not page.runs.is_reading and len(page.model.rows) > 8)
    steps = next(at for at in range(page.model.columnCount()) if page.model.headerData(at, ACROSS) == "Steps")
    needed = page.table.fontMetrics().horizontalAdvance("7,010 of 10,000") + 2 * CELL_PADDING
    assert page.table.columnWidth(steps) >= needed, "a long run's steps were elided"
    rows = page.table.as_text(list(range(page.table.sorted.rowCount())))
    assert "Sweep rates · best lr 1e-" in rows and "\t2 runs" in rows and "rows · lr" not in rows
    assert page.table.horizontalScrollBar().maximum() == 0 and not page.details.isHidden()
    page.resize(1104, 400)
    page.table.grab()
    assert page.table.verticalScrollBar().maximum() > 0 and page.table.horizontalScrollBar().maximum() == 0
    page.resize(1104, 580)
    assert max(page.table.columns(), key=lambda each: each[1])[0] == "name"
    with monkeypatch.context() as patch, qtbot.waitSignal(page.runs.settled):
        patch.setattr(
            "backend.runs.sweep_results.read_json", lambda *_, **__: pytest.fail("an unchanged sweep was read")
        )
        page.refresh()
    page.search.setText("seed")
    found = page.table.as_text(list(range(page.table.sorted.rowCount())))
    assert "rows · lr" in found and "Sweep rates" not in found, "a search finds runs"
    page.search.clear()
    clone = page.runs.records[real_runs / "clone"].summary
    assert (
        clone.step == 2 and clone.worked_s is None and clone.began > page.runs.records[real_runs / "lora"].summary.began
    )
    place = next(i for i in range(page.table.sorted.rowCount()) if page.model.is_sweep(page.table._record(i)))
    page.table.selectRow(place)
    assert len(page.table.selected_runs()) == 2 and page.buttons["compare"].text() == "Compare 2 runs"
    QTest.keyClick(page.table, Qt.Key.Key_Right)
    below = [page.table._record(place + i).title for i in (1, 2)]
    assert sorted(below) == ["rows · lr 1e-4", "rows · lr 1e-5"], "one seed tells none apart"
    QTest.keyClick(page.table, Qt.Key.Key_Left)
    page.choose_columns()
    dialog = page.findChild(ColumnDialog)
    everything = [dialog.list.item(i).data(256) for i in range(dialog.list.count())]
    page.table.show_columns([(key, 0) for key in everything])
    texts = page.table.as_text(list(range(len(page.model.rows))))
    assert len(everything) > 150 and "nan" not in texts.lower() and texts.count("Failed") == 1
    for record in page.runs.records.values():
        page.table.choose(Path(record.summary.path))
        assert page.details.folder.text() == record.summary.name
        QApplication.processEvents()
        assert page.details.widget().minimumSizeHint().width() <= page.details.viewport().width(), "edges were cut"
    clone = CloneDialog(RunFolder(real_runs / "lora"), "lora")
    export = ExportPanel(RunFolder(real_runs / "lora"), page.session.service)
    for each in (clone, export):
        qtbot.show(each)
    assert clone.step.count() == 2 and export.choices.weights.count() > 1
    for index in range(export.choices.target.count()):
        export.choices.target.setCurrentIndex(index)
        assert export.command()[-1] == "--json"
    for key in ("trl", "folder"):
        export.choices.target.setCurrentIndex(export.choices.target.findData(key))
        QApplication.processEvents()
    qtbot.waitUntil(lambda: export.choices.target.y() - export.choices.format_line.geometry().bottom() < 40)
    export.switcher.chosen.emit(str(real_runs / "full"))
    assert str(real_runs / "full") in export.command() and export.switcher.text() == "full"


@pytest.mark.parametrize("session", ["light"], indirect=True)
@pytest.mark.parametrize("text", [1.5, pytest.param(1.0, marks=pytest.mark.proof)])
def test_no_text_is_cut(qtbot: QtBot, session: Session, real_runs: Path, monkeypatch, text: float) -> None:
    """In a small window, with the desktop's text at 100 and 150 %: no label, button or menu, and no page sideways."""
    monkeypatch.setattr(theme, "text_scale", lambda: text)
    theme.apply(theme.application(), "light")
    session.service = ServiceHere()  # pyright: ignore
    window = qtbot.show(Window(session), 1280, 680)
    show_run(qtbot, session, real_runs / "lora")
    for key in (*(page.key for page in PAGES), "compare"):
        if key == "compare":
            window.session.comparison_requested.emit([real_runs / name for name in ("lora", "full", "stages")])
        else:
            window.show_page(key)
        for _ in range(20):  # texts come from threads and processes, and the layout after them
            QTest.qWait(20)
            if not (cut := cut_texts(window)):
                break
        assert cut == [], key


def test_comparison(qtbot: QtBot, session: Session, real_runs: Path) -> None:
    """Every metric gets a chart, those of the chart Other too; one in four is drawn, on the other axes one in nine."""
    view = qtbot.show(CompareView(session), 1100, 760)
    names = ["failed", "full", "lora", "stages"]
    names += ["stopped", "resumed", "clone", "old", "rates-1-seed0", "rates-2-seed0"]
    view.compare([read_record(RunFolder(real_runs / name)) for name in names])
    qtbot.waitUntil(lambda: view.comparison is not None and not view.comparison.is_reading, timeout=60_000)
    view.refresh()
    titles = [plot.title for plot in view.grid.plots]
    assert "Reward" in titles and any("terminated" in title.lower() for title in titles)
    for axis, plots in (
        ("tokens", view.grid.plots[::9]),
        ("time", view.grid.plots[::9]),
        ("step", view.grid.plots[::4]),
    ):
        view.axis.choose(axis)
        for plot in plots:
            view.grid.draw(plot)
        newest = [series[-1] for run in view.comparison.runs if len(series := run.series("reward")[1])]
        assert [trace.at(None) for trace in view.grid.plots[0].traces] == newest, axis
        if axis == "time":
            longest = max(view.grid.plots[0].traces, key=lambda trace: len(trace.x)).x
            assert len(longest) > 1000, "points between whole seconds"
            assert view.grid.plots[0].steps.text(1500) == duration(1.5)
    for part in ("settings", "completions", "results"):
        view.part.choose(part)
    assert [row[1] for row in view.results.table[1:5]] == ["Failed", "Finished", "Finished", "Finished"]
    results = {name: row[3] for name, row in zip(names, view.results.table[1:], strict=True)}
    assert results["failed"] == DASH and results["stages"].endswith(", training")
    assert results["lora"].endswith(", valid"), "of its evaluation"
    assert list(view.grid.sections)[:2] == ["Learning", "Held-out"]
    reward = view.grid.plots[0]
    view.grid.draw(reward)
    assert [trace.label for trace in reward.traces] == list("BCDEFGHIJ"), "all but the one that failed at once"
    assert len({(trace.pen.color().name(), trace.pen.style()) for trace in reward.traces}) == 9
    view.smoothing.setCurrentIndex(2)
    assert reward.smoothing == 0.9
    QTest.mouseDClick(view.legend.chips[2], Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: [trace.label for trace in reward.traces] == ["C"], timeout=9_000)
    view.legend.chips[2].click()
    assert len(view.legend.shown()) == 10, "without it none would be left"
    qtbot.waitUntil(lambda: len(reward.traces) == 9)
    for table in (view.results, view.settings):
        assert sum(map(table.columnWidth, range(len(table.table[0])))) <= table.viewport().width()
    view.close_runs()


ACTIONS, FEW_ACTIONS = 2_000, 60
TEXTS = ["", "0", "-1", "1e999", "abc", "lora", "reward >= 1", "ü🙂\u202e"]
TEXTS += ["/", "~", "x" * 300, "0.5", "[1, 2]", "*", "("]
KEYS = [Qt.Key.Key_Return, Qt.Key.Key_Escape, Qt.Key.Key_Tab, Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_Space]
ENABLED = Qt.ItemFlag.ItemIsEnabled
NEVER = ("quit", "close window", "&quit")


def type_into(widget: Any, dice: random.Random) -> None:
    widget.selectAll()
    text = dice.choice(TEXTS)
    if text.isascii():  # QTest types no other keys
        QTest.keyClicks(widget, text)
    else:
        (widget.insert if isinstance(widget, QtWidgets.QLineEdit) else widget.insertPlainText)(text)
    if dice.random() < 0.5:
        QTest.keyClick(widget, dice.choice(KEYS))


def choose_row(view: QtWidgets.QAbstractItemView, dice: random.Random) -> None:
    model = view.model()
    if model is None or (rows := model.rowCount(view.rootIndex())) < 1:
        return
    columns = 1 if isinstance(view, QtWidgets.QListView) else model.columnCount(view.rootIndex())
    index = model.index(dice.randrange(rows), dice.randrange(max(1, columns)))
    view.scrollTo(index, QtWidgets.QAbstractItemView.ScrollHint.EnsureVisible)
    button = Qt.MouseButton.RightButton if dice.random() < 0.15 else Qt.MouseButton.LeftButton
    click = QTest.mouseDClick if dice.random() < 0.2 else QTest.mouseClick
    click(view.viewport(), button, pos=view.visualRect(index).center())


def choose_item(box: QtWidgets.QComboBox, dice: random.Random) -> None:
    model, column, root = box.model(), box.modelColumn(), box.rootModelIndex()
    if rows := [row for row in range(box.count()) if model.flags(model.index(row, column, root)) & ENABLED]:
        box.setCurrentIndex(dice.choice(rows))
        box.activated.emit(box.currentIndex())


def press_tab(bar: QtWidgets.QTabBar, dice: random.Random) -> None:
    if bar.count():
        QTest.mouseClick(bar, Qt.MouseButton.LeftButton, pos=bar.tabRect(dice.randrange(bar.count())).center())


def click_somewhere(widget: QWidget, dice: random.Random) -> None:
    place = QPoint(dice.randrange(max(1, widget.width())), dice.randrange(max(1, widget.height())))
    QTest.mouseMove(widget, place)
    QTest.mouseClick(widget, dice.choice([Qt.MouseButton.LeftButton, Qt.MouseButton.RightButton]), pos=place)


DEEDS: list[tuple[type[QWidget], Callable[[Any, random.Random], None]]] = [
    (QtWidgets.QAbstractButton, lambda button, dice: QTest.mouseClick(button, Qt.MouseButton.LeftButton)),
    (QtWidgets.QComboBox, choose_item),
    (QtWidgets.QTabBar, press_tab),
    (QtWidgets.QAbstractItemView, choose_row),
    (QtWidgets.QLineEdit, type_into),
    (QtWidgets.QPlainTextEdit, type_into),
    (QtWidgets.QTextEdit, type_into),
    (QtWidgets.QAbstractSpinBox, lambda box, dice: box.stepBy(dice.choice([-100, -1, 1, 100]))),
    (QtWidgets.QAbstractSlider, lambda slider, dice: slider.setValue(dice.randint(slider.minimum(), slider.maximum()))),
]


def step(window: Window, dice: random.Random) -> str:
    """One action on whatever is in front; returns what it was."""
    popup = QApplication.activePopupWidget()
    if isinstance(popup, QtWidgets.QMenu):
        actions = [action for action in popup.actions() if is_harmless(action)]
        if actions and dice.random() < 0.6:
            action = dice.choice(actions)
            popup.close()
            action.trigger()
            return f"menu {action.text()}"
        popup.close()
        return "menu closed"
    front = popup or QApplication.activeModalWidget() or window
    if isinstance(front, QtWidgets.QDialog) and dice.random() < 0.1:
        front.reject()
        return f"dialog {front.windowTitle()} closed"
    if front is window and dice.random() < 0.1:
        key = dice.choice(PAGES).key
        window.show_page(key)
        return f"page {key}"
    if front is window and dice.random() < 0.05:
        menus = window.menuBar().findChildren(QtWidgets.QMenu)
        actions = [action for menu in menus for action in menu.actions() if action.text() and is_harmless(action)]
        action = dice.choice(actions)
        action.trigger()
        return f"action {action.text()}"
    kind, deed = dice.choice(DEEDS) if dice.random() < 0.9 else (QWidget, click_somewhere)
    widgets = [widget for widget in front.findChildren(kind) if widget.isVisible() and widget.isEnabled()]
    if not widgets:
        return "nothing"
    widget = dice.choice(widgets)
    described = f"{type(widget).__name__} {widget.accessibleName() or widget.objectName()}"[:80]
    deed(widget, dice)
    return described


def is_harmless(action: QAction) -> bool:
    return action.isEnabled() and action.isVisible() and action.text().replace("&", "").strip().lower() not in NEVER


@pytest.fixture
def tame(monkeypatch, tmp_path: Path) -> None:
    """No process is started, no native dialog blocks, and nothing outside the runs folder is touched."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(QProcess, "setProgram", lambda *_: None)  # Qt calls its own startDetached all the same
    monkeypatch.setattr(QProcess, "start", lambda *_: None)
    monkeypatch.setattr(QFile, "moveToTrash", lambda *_: False)
    monkeypatch.setattr(QDesktopServices, "openUrl", lambda *_: True)
    for name in ("getOpenFileName", "getSaveFileName"):
        monkeypatch.setattr(QtWidgets.QFileDialog, name, lambda *_: ("", ""))
    monkeypatch.setattr(QtWidgets.QFileDialog, "getExistingDirectory", lambda *_: "")
    monkeypatch.setattr(QtWidgets.QInputDialog, "getText", lambda *_: ("", False))
    monkeypatch.setattr(QtWidgets.QMessageBox, "exec", lambda *_: int(QtWidgets.QMessageBox.StandardButton.Cancel))
    monkeypatch.setattr(QtWidgets.QMessageBox, "warning", lambda *_: QtWidgets.QMessageBox.StandardButton.Ok)
    monkeypatch.setattr(QtWidgets.QDialog, "exec", lambda *_: int(QtWidgets.QDialog.DialogCode.Rejected))


@pytest.mark.parametrize(
    ("seed", "actions"),
    [(5, FEW_ACTIONS), *(pytest.param(seed, ACTIONS, marks=pytest.mark.proof) for seed in range(5))],
)
@pytest.mark.usefixtures("tame")
def test_a_random_walk(seed: int, actions: int, qapp: QApplication, real_runs: Path, tmp_path: Path, monkeypatch):
    shutil.copytree(real_runs, tmp_path / "runs")
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path / "runs"))
    dice = random.Random(seed)
    deeds, errors, problems = list[str](), list[str](), list[str]()
    monkeypatch.setattr(sys, "excepthook", lambda *error: errors.append("".join(traceback.format_exception(*error))))
    theme.apply(qapp, "dark" if seed % 2 else "light")
    session = Session(Prefs(tmp_path / "prefs"))
    window = Window(session)
    session.restore()
    window.resize(1280, 800)
    window.show()
    for _ in range(actions):
        deeds.append(step(window, dice))
        qapp.processEvents()
        if not window.isVisible():
            window.show()
        if errors:
            problems += [*deeds[-5:], *errors]
            errors.clear()
    for dialog in window.findChildren(QtWidgets.QDialog):
        dialog.reject()
    window.close()
    qapp.sendPostedEvents(None, QEvent.Type.DeferredDelete.value)
    assert not problems + errors, "\n".join(problems + errors)
    assert len(set(deeds)) > min(100, actions // 6)  # what is enabled depends on what has loaded
