"""The Sweeps page: the forecast of a sweep, and results that are read from its folder as they come."""

from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt

from app.pages.sweeps.parallel import ParallelLine
from app.pages.sweeps.sweeps_page import SHARE, SweepsPage, forecast
from app.state import sweeps as sweeps_module
from app.state.run_list import RunList
from app.state.session import Session
from app.state.sweeps import SweepForm
from backend.runs.sweep import load_sweep
from backend.runs.sweep_results import (
    RungResult,
    SweepFolder,
    fresh_results,
    make_runs,
    make_sweep,
    read_results,
    sweep_folder,
    write_results,
)
from backend.utils.errors import UserError
from backend.utils.places import demo_config, runs_folder
from tests.support.trainer_by_hand import locked, write_event
from tests.support.windows import point_at, table_texts

BASE: dict[str, Any] = {"model": "m", "data": "d", "iters": 80, "steps_per_eval": 10, "group_size": 4, "batch_size": 2}


def finished(name: str = "earlier") -> SweepFolder:
    """A sweep of three configurations and two seeds: the first is given up, the third has failed, the second wins."""
    plan = SweepForm(name, seeds="0, 1", first_rung="20").plan(BASE)
    folder = make_sweep(plan)
    results = fresh_results(plan)
    for each, values, state in zip(
        results.configurations, [(1, 1.2), (2, 1.5), (3, 4)], ["given up", "finished", "failed"], strict=True
    ):
        for run, value in zip(each.runs, values, strict=True):
            run.value, run.state, run.step, run.completions = value, state, 80, 640
    results.state, results.sentence, results.rungs = "finished", "The best configuration is 2.", [RungResult(20, [2])]
    write_results(folder, results)
    return folder


@pytest.fixture
def page(qtbot: Any, session: Session) -> SweepsPage:
    session.draft.load(demo_config())
    shown = SweepsPage(session)
    qtbot.addWidget(shown)
    shown.resize(1060, 700)
    return shown


def test_the_fields_are_a_sweep_over_the_form(page: SweepsPage) -> None:
    page.show()
    page.varied.rows[0].values.setText("1e-5, 1e-4")
    page.varied.add("temperature", "0.8, 1.0, 1.2")
    page.seeds.setText("3, 4")
    assert page.plan is not None and page.start_button.isEnabled()
    assert [each.settings for each in page.plan.configurations][-1] == {"learning_rate": 1e-4, "temperature": 1.2}
    assert page.plan.seeds == (3, 4) and len(page.plan.members()) == 12
    assert page.plan.halving is not None and page.plan.halving.first_rung == 8, "Eval of the demo"
    assert page.plan.base["model"] == page.session.draft.value("model") and "run_name" not in page.plan.base
    assert "6 configurations × 2 seeds: 12 runs" in page.what.text()
    page.halves.setChecked(False)
    assert page.plan.halving is None and page.first_rung.isHidden()
    page.seeds.setText("3")
    page.varied.rows[0].values.setText("1e-5")
    page.varied.rows[1].values.setText("1.0")
    assert page.what.text().startswith("1 configuration × 1 seed: 1 run, ")


def test_without_held_out_rows_the_page_says_what_ranks(page: SweepsPage) -> None:
    page.show()
    dataset, splits = page.session.dataset, {"train": {"rows": 90}, "valid": {"rows": 10}}
    dataset._set_state("ready", {"splits": splits})
    assert page.plan.rank_by == "held_out" and page.hold_out.isHidden()
    dataset._set_state("ready", {"splits": {"train": {"rows": 100}}})
    assert page.plan.rank_by == "training" and not page.rank.buttons["held_out"].isEnabled()
    assert page.rank_note.text().startswith("The data has no held-out rows, so runs are ranked")
    page.hold_out.click()
    assert page.session.draft.value("validation_split") == 0.1
    assert page.plan.rank_by == "held_out" and page.rank_note.isHidden()
    page.session.draft.set("steps_per_eval", 0)
    assert page.plan.rank_by == "training" and page.plan.halving.first_rung == 8, "a quarter of the run"
    page.hold_out.click()
    assert page.plan.rank_by == "held_out" and page.session.draft.value("steps_per_eval")


def test_a_field_of_the_form_without_a_number_is_told(page: SweepsPage) -> None:
    page.session.draft.set("steps_per_eval", "1x")
    page.show()
    assert page.plan is None and not page.start_button.isEnabled()
    assert page.problem.text() == "Eval must be a whole number, not '1x'."


def test_a_taken_name_is_refused_at_its_field(page: SweepsPage) -> None:
    finished("sweep")
    again = SweepsPage(page.session)
    assert again.name.text() == "sweep-2", "a free name after a restart"
    page.show()
    page.name.setText("sweep")
    assert page.name_problem.isVisible() and "sweep exists already" in page.name_problem.text()
    assert page.name.property("problem") and not page.start_button.isEnabled() and page.problem.isHidden()
    page.name.setText("other")
    assert page.name_problem.isHidden() and page.start_button.isEnabled()


def test_the_forecast_counts_what_is_given_up_and_one_base() -> None:
    plan = SweepForm(varied=(("learning_rate", "1, 2, 3, 4", "list"),), seeds="0, 1", first_rung="20").plan(BASE)
    words = forecast(plan, 0.5, 10e9, 1e9)
    assert "8 runs, 320 steps, 2,560 training completions (50% of a full sweep), about 21" in words
    assert "2 after step 20, 1 after step 40" in words
    assert "8 runs share one base model in memory, about 17.0" in words
    full = SweepForm(seeds="0").plan(BASE | {"train_type": "full"})
    assert "one after the other" in forecast(full, None, None)


def test_a_text_as_the_number_of_steps_is_refused_as_what_it_is() -> None:
    with pytest.raises(UserError, match="Iterations"):
        SweepForm(rank_by="training").plan({**BASE, "iters": "abc", "steps_per_eval": 0})


def test_starting_makes_the_folder_and_a_detached_process(page: SweepsPage, monkeypatch) -> None:
    started: list[tuple[list[str], Path]] = []
    monkeypatch.setattr(sweeps_module, "start_detached", lambda command, run: started.append((command, run.path)))
    page.show()
    plan = page.plan
    page.start_button.click()
    folder = sweep_folder("sweep")
    (command, path) = started[0]
    assert command[-3:] == ["sweep", str(folder.path), "--resume"] and path == folder.path
    assert load_sweep(folder.plan) == plan
    assert page.start_button.property("role") == "", "not the main button while one runs"
    assert page.state.text() == "Starting" and page.stop_button.isEnabled() and page.name.text() == "sweep-2"
    assert [row[-1] for row in table_texts(page.table.model())] == ["Waiting"] * 3
    page.start_button.click()
    assert len(started) == 1, "one at a time"


def test_a_live_sweep_is_followed_and_stopped(page: SweepsPage) -> None:
    folder = finished("live")
    results = read_results(folder)
    results.state, results.rungs = "running", []
    for each in results.configurations:
        for run in each.runs:
            run.state, run.step = "training", 10
    write_results(folder, results)
    page.show()
    assert page.state.text() == "Interrupted" and page.resume_button.isEnabled()
    with locked(folder):
        page.sweeps.refresh()
        assert page.state.text() == "Running" and not page.resume_button.isEnabled()
        assert "3 of 3 configurations, step 10," in page.sentence.text()
        page.session.starter.start()
        assert not list(runs_folder().glob("demo-*")), "one training at a time"
        page.table.selectRow(1)
        results.configurations[0].runs[0].value = 9.0
        write_results(folder, results)
        page.sweeps.refresh()
        chosen = page.table.selected_row
        assert chosen is not None and chosen.number == 2, "the row moved, the choice did not"
        page.table.selectRow(0)
        results.configurations[1].runs[0].value = 90.0
        write_results(folder, results)
        page.sweeps.refresh()
        assert page.table.selected_row.number == 2, "the best stays chosen"
        page.stop_button.click()
        assert folder.control.read_text() == "stop"


def test_a_stopped_sweep_is_starting_until_its_new_process_writes(page: SweepsPage, monkeypatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(sweeps_module, "start_detached", lambda command, run: started.append(command))
    results = read_results(folder := finished("stopped"))
    results.state = "stopped"
    write_results(folder, results)
    page.show()
    page.resume_button.click()
    page.sweeps.refresh()
    assert page.state.text() == "Starting" and not page.resume_button.isEnabled() and len(started) == 1
    results.state, results.sentence = "failed", "There is no data."
    write_results(folder, results)
    page.sweeps.refresh()
    assert page.state.text() == "Failed" and page.sentence.text() == "There is no data."


def test_the_row_of_a_sweep_has_the_results_of_its_best_run(page: SweepsPage, qtbot: Any, tmp_path: Path) -> None:
    results = read_results(folder := finished())
    make_runs(load_sweep(folder.plan), folder)
    results.configurations[1].runs[1].value = 9
    write_results(folder, results)
    runs = RunList(tmp_path)
    with qtbot.waitSignal(runs.settled):
        runs.refresh()
    assert runs.sweeps[str(folder.path)].record.settings["seed"] == 1


def test_of_two_runs_that_train_in_turns_one_is_queued(page: SweepsPage, qtbot: Any, tmp_path: Path) -> None:
    plan = SweepForm("turns", first_rung="20").plan(BASE)
    make_runs(plan, folder := make_sweep(plan))
    first, second = (folder.run(member.run) for member in plan.members()[:2])
    runs, states = RunList(tmp_path), dict[str, str]()
    runs.read.connect(lambda records: states.update({each.summary.name: each.summary.state for each in records}))
    with locked(first), locked(second), qtbot.waitSignal(runs.settled):
        for run in (second, first):
            write_event(run, "started", iterations=80)
        write_event(second, "phase", phase="waiting")
        runs.refresh()
    assert (states[first.name], states[second.name]) == ("running", "queued")
    with locked(second):
        runs.reread(second.path)
    assert states[second.name] == "queued", "also when it is read alone, since it is on show"


def test_the_result_is_a_table_with_the_best_first(page: SweepsPage) -> None:
    finished()
    page.show()
    assert [row[0] for row in table_texts(page.table.model())] == ["2", "1", "3"]
    assert table_texts(page.table.model())[0][1:] == ["3e-5", "1.75", "0.354", "2 of 2", "80", "1,280", "Best"]
    assert table_texts(page.table.model())[2][2] == "–" and table_texts(page.table.model())[2][-1] == "Failed"
    assert page.sentence.text() == "The best configuration is 2." and page.clone_button.isEnabled()
    assert page.table.as_text([0]).startswith("No.\tLearning Rate\tHeld-out reward\t± sd")


def test_the_winner_can_be_opened_used_and_trained_on(qtbot: Any, page: SweepsPage, monkeypatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(sweeps_module, "start_detached", lambda command, run: commands.append(command))
    finished()
    page.show()
    with qtbot.waitSignal(page.session.settings_requested) as used:
        page.use_button.click()
    assert used.args[0].name == "earlier-2-seed0", "the seed with the highest value"
    with qtbot.waitSignal(page.session.page_requested) as opened:
        page.table.activated.emit(page.table.model().index(0, 0))
    assert opened.args == ["monitor"] and page.session.run.folder.path == runs_folder() / "earlier-2-seed0"
    with qtbot.waitSignal(page.session.comparison_requested) as compared:
        page.compare_button.click()
    assert [path.name for path in compared.args[0]][:2] == ["earlier-2-seed0", "earlier-2-seed1"]
    page.view.choose("parallel")
    plot = page.plot
    page.grab()
    start, end = plot.polygon(plot._lines[-1]).toList()
    point_at(plot, ((start + end) / 2).toPoint())
    assert plot.current is not None and plot.current.key == "earlier-3-seed1"
    assert plot.accessibleName().endswith("run · lr 1e-4 · seed 1: Learning Rate 1e-4, Held-out reward 4")
    qtbot.keyClick(plot, Qt.Key.Key_Down)
    with qtbot.waitSignal(page.session.page_requested):
        qtbot.keyClick(plot, Qt.Key.Key_Return)
    assert page.session.run.folder.name == "earlier-3-seed0"
    plot.show_lines(["Loss"], [ParallelLine(name, name, (loss,)) for name, loss in (("a", 0.1), ("b", 0.5))], -1)
    assert plot._lines[-1].key == "a", "the lowest loss is on top"
    page.table.cells.results.metric = "loss"
    bars = [bar for place in range(3) if (bar := page.table.cells.index(place, 2).data(SHARE))]
    assert len(bars) > 1 and bars == sorted(bars), "the lowest has the longest bar"
    page.table.cells.results.metric = "reward"
    plot.show_lines(["Reward"], [])
    assert plot.accessibleName().endswith("No run has a value yet."), "the plot was empty"
    page.clone_button.click()
    words = ["clone", str(runs_folder() / "earlier-2-seed0"), "--warm", "--set", "iters=160", "--start"]
    assert commands[0][-6:] == words
