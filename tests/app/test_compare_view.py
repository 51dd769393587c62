"""Comparing runs: curves on the same charts, settings that differ, results, and completions of the same prompt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app import theme
from app.pages.runs import compare_view
from app.pages.runs.compare_view import CompareView
from app.state.session import Session
from app.widgets.basic.number_format import figure
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import as_markdown, read_record
from tests.support import made_up_runs
from tests.support.windows import PatientQtBot


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
    assert view.grid is not None
    qtbot.waitUntil(lambda: not view.grid.turns.isActive())


def plot(view: CompareView, title: str):
    return next(plot for plot in view.grid.plots if plot.title == title)


def test_each_run_has_a_curve_of_its_own_colour_in_every_chart(unchanged: CompareView) -> None:
    reward = plot(unchanged, "Reward")
    drawn = [(trace.label, trace.colour, len(trace.x)) for trace in reward.traces]
    assert drawn == [("A", "reward:0", 60), ("B", "reward:1", 30)]
    assert [trace.pen.color() for trace in reward.traces] == [theme.reward_pen(n).color() for n in (0, 1)]
    titles = [plot.title for plot in unchanged.grid.plots]
    assert titles[:2] == ["Reward", "Rewards per function: Accuracy"] and "Held-out reward: Reward" in titles
    assert len(titles) == len(set(titles))


def test_the_axis_can_be_tokens_or_time(qtbot, view: CompareView, archive: Path) -> None:
    slow = view.comparison.runs[0]
    reward = view.comparison.metrics()[0]
    tokens, values = view.comparison.curve(slow, reward, "tokens")
    assert tokens[-1] == 60 * 3100 and values[-1] == slow.series("reward")[1][-1]
    assert np.isnan(values[0]), "nothing is made up"
    assert set(values[np.isfinite(values)]) == set(slow.series("reward")[1])
    fast = view.comparison.curve(view.comparison.runs[1], reward, "tokens")
    assert np.array_equal(fast[0], tokens) and np.isnan(fast[1][-1]), "no curve goes on after its run"
    seconds, _ = view.comparison.curve(slow, reward, "time")
    assert seconds[-1] == pytest.approx(np.sum(slow.series("time/step")[1]), abs=1)
    view.axis.choose("tokens")
    qtbot.waitUntil(lambda: plot(view, "Reward").traces[0].x[-1] == 60 * 3100)
    plot(view, "Reward").set_step(None)
    fast_rewards = view.comparison.runs[1].series("reward")[1]
    assert plot(view, "Reward").traces[1].at(None) == fast_rewards[-1], "of a run that ended early too"
    plot(view, "Reward").set_step(int(tokens[-1]))
    assert plot(view, "Reward").step_label.text() == "186,000 tokens"


def test_the_tables_show_what_differs_and_what_was_reached(unchanged: CompareView) -> None:
    settings, results = unchanged.tables()
    assert settings == [["Setting", "A  slow", "B  fast"], ["Learning Rate", "1e-06", "0.0001"]]
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
    shared = panel.shared[0]
    best = max(one["reward"] for one in shared.groups[0]["completions"])
    assert shared.best()[0]["reward"] == best
    rows = [json.loads(line) for line in (archive / "fast" / "completions.jsonl").read_text().splitlines()]
    for row in rows:
        row["prompt"] = f"Other: {row['prompt']}"
    (archive / "third" / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compare(qtbot, view, archive, "slow", "third")
    qtbot.waitUntil(lambda: panel.nothing.isVisible())
