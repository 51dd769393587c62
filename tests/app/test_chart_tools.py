"""What can be done with a chart: log axis, hidden curves, zoom and pan, marks, steps by keyboard, files."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QPointF, QRectF, Qt
from PySide6.QtGui import QImage
from PySide6.QtTest import QTest

from app import theme
from app.pages.shared.run_charts import ChartExport, RunCharts
from app.state.charts import CHARTS, column_names
from app.state.prefs import Prefs
from app.state.run_state import Mark
from app.state.session import Session
from app.widgets.basic.dialogs import keep_folders_in
from app.widgets.charts.chart_files import pile
from app.widgets.charts.chart_grid import ChartContent, ChartGrid, ZoomButton
from app.widgets.charts.curves import axis_range, has_spike
from app.widgets.charts.mark_painter import APART, MarkPainter
from app.widgets.charts.plot import Plot, Trace
from app.widgets.charts.plot_view import log_ticks
from backend.runs.metric_names import our_name

X = np.arange(1, 41)
SPIKY = np.where(X == 20, 9.0, 0.01 + X / 4000)
MARKS = [Mark(10, "checkpoint", "Saved: a checkpoint."), Mark(20, "health", "KL jumped.")]


@pytest.fixture
def grid(qtbot, qapp):
    theme.apply(qapp, "light")
    contents = [
        ChartContent([Trace("KL", "kl", X, SPIKY)], marks=MARKS),
        ChartContent([Trace("One", "accent", X, X / 40), Trace("Two", "reward:1", X, -X / 40)], marks=MARKS),
        ChartContent([], "Waits."),
    ]
    plots = [Plot("KL", "nats", "nats"), Plot("Scores", "score"), Plot("Empty")]
    widget = ChartGrid(plots, contents.__getitem__, lambda index: True)
    qtbot.addWidget(widget)
    widget.resize(1100, 300)
    widget.show()
    widget.refresh((1, 40))
    settle(qtbot, widget)
    return widget


def settle(qtbot, grid: ChartGrid) -> None:
    qtbot.waitUntil(lambda: not grid._turns.isActive())


def place(plot: Plot, step: float, value: float) -> QPoint:
    """Where a point of the plot is in its view."""
    view = plot._view
    return view.mapFromScene(view.box.mapViewToScene(QPointF(step, value)))


def click(plot: Plot, step: float, value: float) -> None:
    QTest.mouseClick(plot._view.viewport(), Qt.MouseButton.LeftButton, pos=place(plot, step, value))


# ── the value axis ───────────────────────────────────────────────────────────────────────────────


def test_a_spike_offers_a_logarithmic_axis_which_spreads_the_other_values(grid: ChartGrid) -> None:
    kl, scores, _ = grid.plots
    assert kl._log.isVisible() and not scores._log.isVisible()
    low, high = kl._view.box.viewRange()[1]
    assert (SPIKY[0] - low) / (high - low) < 0.01, "flat"
    kl._log.click()
    low, high = kl._view.box.viewRange()[1]
    assert low < math.log10(SPIKY.min()) and high > math.log10(9)
    assert kl._view._curves[0].line.getData()[1][19] == pytest.approx(math.log10(9))
    labels = kl._view._value_axis.tickStrings([-2.0, -1.0, 0.0, 1.0], 1, 1)
    assert labels == ["0.01", "0.1", "1", "10"]
    assert [entry.value for entry in kl._legend._entries] == ["0.0200\u202fnats"], "values stay what they are"
    kl._log.click()
    assert kl._view.box.viewRange()[1][0] == pytest.approx(0, abs=0.01) and kl._log.isVisible()


def test_on_a_logarithmic_axis_zero_is_a_gap_and_only_negative_values_have_none(qtbot, qapp) -> None:
    plot = Plot("Share")
    qtbot.addWidget(plot)
    plot.show()
    plot.show_traces([Trace("A", "accent", X, np.where(X < 5, 0.0, X))])
    plot.set_log(True)
    y = plot._view._curves[0].line.getData()[1]
    assert np.isnan(y[:4]).all() and np.isfinite(y[4:]).all()
    plot.show_traces([Trace("A", "accent", X, -X)])
    assert not plot.is_log and plot._view._curves[0].line.getData()[1][0] == -1


def test_on_a_logarithmic_axis_a_band_that_reaches_below_zero_ends_below_the_curve(qtbot, qapp) -> None:
    plot = Plot("Reward")
    qtbot.addWidget(plot)
    plot.show()
    plot.show_traces([Trace("A", "accent", X, X / 10, X / 10 - 1, X / 10 + 1)])
    plot.set_log(True)
    low = plot._view._curves[0].low.getData()[1]
    assert np.isfinite(low).all() and low[0] == pytest.approx(-2) and low[-1] == pytest.approx(math.log10(3))


def test_a_spike_is_told_from_noise_and_from_growth() -> None:
    assert has_spike(SPIKY)
    assert not has_spike(np.random.default_rng(0).normal(5, 1, 500)), "noise"
    assert not has_spike(np.linspace(0, 9, 500)), "growth"
    assert not has_spike(SPIKY - 1), "below zero a logarithm has no place"
    assert not has_spike(SPIKY[15:22]), "too few to judge"


def test_the_axis_of_a_share_ends_at_a_hundred_percent() -> None:
    """It went to 110 %."""
    assert axis_range(np.array([0.2, 1.0]), unit="share")[1] <= 1.02
    assert axis_range(np.array([0.2, 0.5]), unit="share")[1] == pytest.approx(0.521)
    assert axis_range(np.array([0.2, 1.5]), unit="share")[1] > 1.5


@pytest.mark.parametrize("span", [(-2.0, 1.0), (-0.1, 0.2), (0.0, 0.01), (-9.0, 9.0)])
def test_a_logarithmic_axis_has_a_few_ticks_inside_its_range(span: tuple[float, float]) -> None:
    found = log_ticks(*span, most=6)
    assert 2 <= len(found) <= 7 and all(span[0] <= tick <= span[1] for tick in found)


def test_a_power_of_ten_is_written_once_beside_the_axis(qtbot) -> None:
    """Labels such as 4.5e−4 ran into the title."""
    plot = Plot("Rate", "rate")
    qtbot.addWidget(plot)
    plot.show()
    plot.show_traces([Trace("Rate", "muted", X, X * 1.1e-5)])
    axis = plot._view._value_axis
    assert axis.labelText == "rate, 10⁻⁴"
    assert axis.tickStrings([0, 1.5e-4, 3e-4, 4.5e-4], 1, 1.5e-4) == ["0", "1.5", "3", "4.5"]


def test_the_grid_lines_lie_below_the_curves(grid: ChartGrid) -> None:
    view = grid.plots[0]._view
    assert view._value_axis.zValue() < view.box.zValue()


# ── curves ───────────────────────────────────────────────────────────────────────────────────────


def test_a_click_on_the_legend_hides_a_curve_and_fits_the_axis_to_the_rest(grid: ChartGrid) -> None:
    scores = grid.plots[1]
    assert scores._view.box.viewRange()[1][0] < -0.9
    line, left, entry = list(scores._legend._positions())[1]
    where = QPoint(int(left) + 4, int((line + 0.5) * scores._legend._line))
    assert entry.label == "Two"
    QTest.mouseClick(scores._legend, Qt.MouseButton.LeftButton, pos=where)
    assert scores._view.box.viewRange()[1][0] > -0.1 and len(scores._view._curves) == 1
    assert [entry.hidden for entry in scores._legend._entries] == [False, True], "it stays in the legend"
    QTest.mouseClick(scores._legend, Qt.MouseButton.LeftButton, pos=where)
    assert len(scores._view._curves) == 2


def test_parts_of_a_whole_lie_on_top_of_each_other() -> None:
    first = Trace("A", "accent", X, np.ones(40), stacked=True)
    second = Trace("B", "clip", X, np.where(X == 3, np.nan, 2.0), stacked=True)
    line = Trace("All", "text", X, np.full(40, 3.5))
    piled = pile([first, line, second])
    assert piled[0].low.tolist() == [0.0] * 40 and piled[0].y.tolist() == [1.0] * 40
    assert piled[1] is line
    assert np.isnan(piled[2].y[2]) and piled[2].y[3] == 3 and piled[2].low[3] == 1 and piled[2].high[2] == 1


# ── steps ────────────────────────────────────────────────────────────────────────────────────────


def test_a_click_on_a_point_asks_for_its_step_and_one_beside_the_curves_does_not(grid: ChartGrid) -> None:
    chosen: list[int] = []
    grid.step_chosen.connect(chosen.append)
    scores = grid.plots[1]
    click(scores, 30, 0.75)
    assert chosen == [30]
    click(scores, 5, 0.9)
    assert chosen == [30], "nothing is there"


def test_a_double_click_on_a_zoomed_chart_shows_all_and_does_not_leave_the_page(qtbot, grid: ChartGrid) -> None:
    chosen: list[int] = []
    grid.step_chosen.connect(chosen.append)
    grid.zoom((10, 30))
    settle(qtbot, grid)
    click(grid.plots[1], 20, 0.5)
    QTest.mouseDClick(grid.plots[1]._view.viewport(), Qt.MouseButton.LeftButton, pos=place(grid.plots[1], 20, 0.5))
    qtbot.wait(450)
    assert grid.span is None and chosen == []
    grid.zoom((10, 30))
    settle(qtbot, grid)
    click(grid.plots[1], 20, 0.5)
    qtbot.waitUntil(lambda: chosen == [20])


def test_keys_move_the_marked_step_in_all_charts_and_open_its_completions(grid: ChartGrid) -> None:
    kl, scores, _ = grid.plots
    chosen: list[int] = []
    grid.step_chosen.connect(chosen.append)
    for key in (Qt.Key.Key_Left, Qt.Key.Key_Left, Qt.Key.Key_Left):
        QTest.keyClick(kl, key)
    assert kl._step_label.text() == scores._step_label.text() == "step 38"
    QTest.keyClick(kl, Qt.Key.Key_Return)
    assert chosen == [38]
    QTest.keyClick(kl, Qt.Key.Key_Home)
    assert "step 1" in kl.accessibleName()
    QTest.keyClick(kl, Qt.Key.Key_Escape)
    assert kl._step_label.text() == ""


def test_a_zoom_is_told_and_has_three_ways_back(qtbot, grid: ChartGrid) -> None:
    told = ZoomButton(grid)
    qtbot.addWidget(told)
    assert told.isHidden()
    for go_back in (told.click, lambda: QTest.keyClick(grid.plots[0], Qt.Key.Key_Escape), lambda: grid.zoom((-5, 90))):
        grid.zoom((10, 20))
        settle(qtbot, grid)
        assert not told.isHidden() and "10 – 20" in told.text()
        assert grid.plots[1]._step_label.text() == "steps 10 – 20"
        go_back()
        settle(qtbot, grid)
        assert told.isHidden() and grid.plots[1]._view.box.viewRange()[0][1] > 40


def test_a_range_is_moved_by_dragging_with_shift_and_stays_inside_the_run(qtbot, grid: ChartGrid) -> None:
    grid.zoom((10, 20))
    settle(qtbot, grid)
    view = grid.plots[1]._view
    start, end = place(grid.plots[1], 18, 0.4), place(grid.plots[1], 13, 0.4)
    shift = Qt.KeyboardModifier.ShiftModifier
    QTest.mousePress(view.viewport(), Qt.MouseButton.LeftButton, shift, start)
    QTest.mouseMove(view.viewport(), end)
    QTest.mouseRelease(view.viewport(), Qt.MouseButton.LeftButton, shift, end)
    settle(qtbot, grid)
    assert grid.span is not None and grid.span[0] == pytest.approx(15, abs=0.6)
    assert grid.plots[0]._view.box.viewRange()[0][0] == pytest.approx(15, abs=1)
    grid.zoom((35, 45))
    assert grid.span == (30, 40)


# ── marks ────────────────────────────────────────────────────────────────────────────────────────


def test_marks_are_at_their_steps_and_a_thousand_of_them_are_thinned() -> None:
    painter, area = MarkPainter(), QRectF(100, 0, 400, 100)
    routine = [Mark(step, "eval", f"Evaluated {step}.") for step in range(1000)]
    painter.set_marks([*routine, Mark(500, "change", "Changed: beta 0.1 → 0.2.")])
    placed = painter.placed((0, 1000), area)
    assert len(placed) <= 400 / APART + 2
    assert len({x // APART for _, x in placed}) == len(placed), "none on another"
    assert [(mark.step, x) for mark, x in placed if mark.kind == "change"] == [(500, 300.0)], "what matters is kept"
    assert painter.placed((2000, 3000), area) == []


def test_a_mark_says_its_sentence_below_the_pointer_and_beside_the_marked_step(grid: ChartGrid) -> None:
    view = grid.plots[0]._view
    area, span = view.box.sceneBoundingRect(), view.box.viewRange()[0]
    x = area.left() + (20 - span[0]) / (span[1] - span[0]) * area.width()
    assert view._marks.sentences_near(span, area, x, "step {}".format) == ["Step 20: KL jumped."]
    assert view._marks.sentences_near(span, area, x + 30, str) == []
    grid.plots[0].hovered.emit(20)
    assert "KL jumped." in grid.plots[0].accessibleName()


def test_marks_are_painted(grid: ChartGrid) -> None:
    view = grid.plots[0]._view
    with_marks = view.grab().toImage()
    view.set_marks([])
    assert view.grab().toImage() != with_marks


# ── files ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def export(grid: ChartGrid, tmp_path: Path) -> ChartExport:
    told: list[str] = []
    keep_folders_in(Prefs(tmp_path / "prefs"))
    made = ChartExport(grid, lambda: "my-run", told.append)
    made.told = told
    return made


def test_all_charts_with_data_become_files(qtbot, export: ChartExport, tmp_path: Path) -> None:
    for format in ("png", "svg", "csv"):
        export.write_all(tmp_path, format)
        qtbot.waitUntil(lambda: not export._turns.isActive())
    names = sorted(path.name for path in tmp_path.glob("my-run-*"))
    assert names == [f"my-run-{chart}.{format}" for chart in ("kl", "scores") for format in ("csv", "png", "svg")]
    assert export.told == [f"2 charts are in {tmp_path.name}."] * 3
    image = QImage(str(tmp_path / "my-run-kl.png"))
    assert image.width() == 2 * export._grid.plots[0].width(), "twice as sharp as on the screen"
    texts = " ".join(ElementTree.parse(tmp_path / "my-run-scores.svg").getroot().itertext())
    assert all(text in texts for text in ("Scores", "score", "step", "One", "Two")), "title, axes and legend, as text"


def test_the_table_of_a_chart_has_every_step_and_reads_back_exactly(export: ChartExport, tmp_path: Path) -> None:
    plot = Plot("Mixed")
    late = Trace("Late", "clip", np.array([2, 50]), np.array([1 / 3, np.nan]))
    plot.traces = [Trace("KL", "kl", X, SPIKY), late]
    assert export._write(plot, tmp_path / "a.csv", "csv")
    rows = list(csv.reader((tmp_path / "a.csv").open()))
    assert rows[0] == ["step", "KL", "Late"] and [row[0] for row in rows[1:]] == [*map(str, range(1, 41)), "50"]
    assert [float(row[1]) for row in rows[1:41]] == SPIKY.tolist()
    assert rows[2][2] == repr(1 / 3) and rows[1][2] == "" and rows[-1] == ["50", "", ""]


def test_tables_have_the_names_of_the_metrics_where_they_are_asked_for(qtbot, qapp, tmp_path: Path) -> None:
    """Labels, the event log's names or TRL's, as metrics.csv has them; over every curve of every chart."""
    reward, total, lengths = (
        next((chart, curve) for chart in CHARTS if chart.title == title for curve in chart.curves)
        for title in ("Reward", "Clip ratios", "Held-out lengths")
    )
    assert column_names(*reward, "labels") == ()
    assert column_names(*reward, "diary") == ("reward", "reward - reward_std", "reward + reward_std")
    assert column_names(*reward, "trl")[1] == "train/reward - train/reward_std_over_step"
    assert column_names(*reward, "trl", "batch")[1] == "train/reward - train/reward_std"
    assert column_names(*total, "trl") == ("train/clip_ratio/region_mean",)
    assert column_names(*lengths, "diary") == tuple(
        f"eval/completions/{kind}_length" for kind in ("mean", "min", "max")
    )
    for chart in CHARTS:
        for curve in chart.curves:
            prefix = "eval/" if chart.held_out else ""
            assert column_names(chart, curve, "diary")[0] == prefix + curve.metric
            back = {our_name(name) for name in column_names(chart, curve, "trl") if " " not in name}
            ambiguous = {"reward_std", "reward_std_within_groups"} & set(curve.metrics)
            assert ambiguous or back == {prefix + name for name in (curve.metric, curve.low, curve.high) if name}
    plot = Plot("KL")
    qtbot.addWidget(plot)
    plot.traces = [Trace("KL", "kl", X, SPIKY, columns=("train/kl",)), Trace("Band", "kl", X, SPIKY, SPIKY, SPIKY)]
    assert plot.as_csv().splitlines()[0] == "step,train/kl,Band,Band low,Band high"


def test_what_columns_are_called_is_kept(qtbot, tmp_path: Path) -> None:
    session = Session(Prefs(tmp_path / "prefs"))
    charts = RunCharts(session)
    qtbot.addWidget(charts.grid)
    assert [name for name, action in charts.menu._namings.items() if action.isChecked()] == ["labels"]
    charts.menu._namings["trl"].trigger()
    assert Prefs(tmp_path / "prefs").chart_columns == "trl"
    session.prefs.settings.setValue("chart_columns", "nonsense")
    assert session.prefs.chart_columns == "labels"


def test_a_folder_that_cannot_be_written_is_told(qtbot, export: ChartExport, tmp_path: Path) -> None:
    for format in ("png", "svg", "csv"):
        export.write_all(tmp_path / "missing", format)
        qtbot.waitUntil(lambda: not export._turns.isActive())
        assert "cannot be written" in export.told.pop() and export.told == []


def test_the_dialog_begins_in_the_folder_that_was_used_last(
    grid: ChartGrid, export: ChartExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = []

    def choose(_parent, _title, start, _filter):
        offered.append(start)
        return str(tmp_path / "charts" / "mine"), ""

    monkeypatch.setattr("app.widgets.basic.dialogs.QFileDialog.getSaveFileName", choose)
    (tmp_path / "charts").mkdir()
    for _ in range(2):
        grid.plots[0].save_requested.emit("csv")
    assert (tmp_path / "charts" / "mine.csv").exists()
    assert offered[1] == str(tmp_path / "charts" / "my-run-kl.csv")
