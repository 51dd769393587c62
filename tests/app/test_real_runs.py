"""The pages over runs that the real trainer made, light and dark.

Made-up runs lack what a newer trainer records, so a page may fail on every real run while their tests are green.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app import theme
from app.pages.completions.completions_page import CompletionsPage
from app.pages.completions.reading_pane import MEASURES
from app.pages.monitor.monitor_page import MonitorPage
from app.pages.runs.clone_dialog import CloneDialog
from app.pages.runs.compare_view import CompareView
from app.pages.runs.run_table import ColumnDialog
from app.pages.runs.runs_page import RunsPage
from app.state.completion_facts import FILTERS
from app.state.processes import VerbProcess
from app.state.session import Session
from app.widgets.basic.number_format import DASH
from app.widgets.export_panel import ExportPanel
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import read_record
from tests.support import small_run

FAILING = """
from backend.rewards import register_reward_function

@register_reward_function("failing_with_a_name_that_is_far_longer_than_the_details_are_wide")
def failing_with_a_name_that_is_far_longer_than_the_details_are_wide(prompts, completions, answer, types=None):
    raise ValueError("Out of luck.")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRA with evaluations and recorded tokens, full fine-tuning, stages, and one that failed."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "failing.py").write_text(FAILING)
    inputs = folder / "inputs"
    evaluated = {"steps_per_eval": 1, "validation_split": 0.25, "val_batches": 1, "record_tokens": True}
    stages = [{"iters": 1, "reward_functions": ["r1_int"]}, {"iters": 2, "reward_functions": ["r1_count_xml"]}]
    name = "failing_with_a_name_that_is_far_longer_than_the_details_are_wide"
    failing = {"reward_functions": [name], "reward_functions_file": str(folder / "failing.py")}
    kinds: dict[str, dict[str, Any]] = {
        "lora": evaluated | small_run.low_half(folder) | {"beta": 0.1, "save_every": 2},
        "full": {"train_type": "full", "learning_rate": 1e-4, "log_kl": True},
        "stages": {"stages": stages, "reward_functions": ["r1_int"], "reward_weights": []},
        "broken": failing | {"reward_weights": []},
    }
    for name, changes in kinds.items():
        ending = small_run.train_here(small_run.settings_for(inputs, **changes), RunFolder(folder / "runs" / name))
        assert ending.kind == ("failed" if name == "broken" else "finished")
    return folder / "runs"


@pytest.fixture(params=["light", "dark"])
def session(qapp: QApplication, runs: Path, monkeypatch, request: pytest.FixtureRequest) -> Iterator[Session]:
    theme.apply(qapp, request.param)
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(runs))
    opened = Session()
    yield opened
    opened.close_run()
    theme.apply(qapp, "light")


def show_run(qtbot: QtBot, session: Session, folder: Path) -> None:
    session.open_run(folder)
    qtbot.waitUntil(lambda: session.run is not None and session.run.has_caught_up)
    assert session.run is not None
    session.run.changed.emit()


@pytest.mark.parametrize("name", ["lora", "full", "stages", "broken"])
def test_monitor(qtbot: QtBot, session: Session, runs: Path, name: str) -> None:
    """Every included chart is drawn, with its marks and with smoothing; the card has the result."""
    page = qtbot.show(MonitorPage(session), 1100, 760)
    show_run(qtbot, session, runs / name)
    page.grid.set_smoothing(0.6)
    for plot in page.grid.included_plots():
        page.grid.draw(plot)
        plot.set_log(True)
        assert plot.traces or plot.waiting.text(), plot.title
    titles = {plot.title for plot in page.grid.included_plots() if plot.traces}
    if name == "broken":
        assert page.verdict.title.text() == "Failed before the first step" and not titles
        assert "Out of luck" in page.verdict.sentence.text()
        assert page.verdict.buttons[0].text() == "Start over", "a checkpoint of step 0 holds nothing learned"
    else:
        assert page.verdict.title.text().startswith("Finished: 3 steps")
        assert {"Reward", "Loss", "Speed", "Memory"} <= titles
        assert ("Held-out reward" in titles) is (name == "lora")
        assert page.tiles["reward"].figure() != DASH
    session.open_run(runs / "stages")
    assert not any(plot.traces for plot in page.grid.plots), "a chart not yet drawn again showed the run before"


def test_completions(qtbot: QtBot, session: Session, runs: Path) -> None:
    """Every filter and every colouring of tokens, over a step and over the whole run."""
    page = qtbot.show(CompletionsPage(session), 1100, 760)
    show_run(qtbot, session, runs / "lora")
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


def test_runs(qtbot: QtBot, session: Session, runs: Path) -> None:
    """Every setting and metric as a column, the details of each run, and the dialogs over it."""
    page = qtbot.show(RunsPage(session), 1240, 760)
    qtbot.waitUntil(lambda: not page.runs.is_reading and len(page.model.rows) == 4)
    page.choose_columns()
    dialog = page.findChild(ColumnDialog)
    assert dialog is not None
    everything = [dialog.list.item(i).data(256) for i in range(dialog.list.count())]
    page.table.show_columns([(key, 0) for key in everything])
    texts = page.table.as_text(list(range(4)))
    assert len(everything) > 150 and "nan" not in texts.lower() and texts.count("Failed") == 1
    for record in page.model.rows:
        page.table.choose(Path(record.summary.path))
        assert page.details.folder.text() == record.summary.name
        QApplication.processEvents()
        assert page.details.widget().minimumSizeHint().width() <= page.details.viewport().width(), "edges were cut"
    clone = CloneDialog(RunFolder(runs / "lora"), "lora", VerbProcess)
    export = ExportPanel(RunFolder(runs / "lora"), VerbProcess)
    for each in (clone, export):
        qtbot.show(each)
    assert clone.step.count() == 2 and export.choices.weights.count() > 1
    for index in range(export.choices.target.count()):
        export.choices.target.setCurrentIndex(index)
        assert export.command()[-1] == "--json"


def test_comparison(qtbot: QtBot, session: Session, runs: Path) -> None:
    """Every metric gets a chart, those of the chart Other too, on every axis."""
    view = qtbot.show(CompareView(session), 1100, 760)
    view.compare([read_record(RunFolder(path)) for path in sorted(runs.iterdir()) if path.is_dir()])
    qtbot.waitUntil(lambda: view.comparison is not None and not view.comparison.is_reading, timeout=60_000)
    view.refresh()
    assert view.grid is not None
    titles = [plot.title for plot in view.grid.plots]
    assert "Reward" in titles and any("terminated" in title.lower() for title in titles)
    for axis in ("tokens", "time", "step"):
        view.axis.choose(axis)
        for plot in view.grid.plots:
            view.grid.draw(plot)
    for part in ("settings", "completions", "results"):
        view.part.choose(part)
    assert [row[1] for row in view.results.table[1:]] == ["Failed", "Finished", "Finished", "Finished"]
    view.close_runs()
